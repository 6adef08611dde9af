"""Strict loading of drafter checkpoints: what is in the files is compared with what the model has, before and after.

transformers fills missing tensors with random values, ignores unexpected ones and unpickles `.bin` files; a drafter
loaded that way still runs, only with nothing accepted. Here each of these is an error.
"""

import copy
import os
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import extract_commit_hash, get_checkpoint_shard_files

from .adapter_loading import ADAPTER_CONFIG_NAME, base_of_adapter, check_adapter_fits
from .checkpoint_files import hub_arguments, listed_names, tensor_shapes
from .checkpoint_formats import native_tensor_name, refuse_foreign_tensors
from .errors import DrafterCheckpointError


# What SGLang and vLLM put in the place of the mask token's embedding.
MASK_EMBEDDING_NAME = "mask_embedding.pt"
DRAFT_VOCABULARY_NAME = "draft_token_ids"


class StrictCheckpointMixin:
    """Replaces a model's `from_pretrained` by one that reads foreign DFlash formats and refuses a damaged file."""

    checkpoint_commit: str | None = None  # of the Hub repository that `from_pretrained` read

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any = None, *model_args: Any, config: Any = None, **kwargs: Any
    ) -> Any:
        """
        Loads a checkpoint in this package's format, z-lab's DFlash format or the AdaFlash authors' format, and refuses
        one with missing, unexpected, mis-shaped or non-finite tensors. Only safetensors files are read. Takes the
        arguments of [`~transformers.PreTrainedModel.from_pretrained`].

        Raises:
            DrafterCheckpointError: The checkpoint cannot be read; the message says why and what to do.
        """
        path = pretrained_model_name_or_path
        hub = hub_arguments(kwargs)
        base = None if path is None else base_of_adapter(path, hub)
        if base is not None:
            adapter_name = kwargs.pop("adapter_name", "default")
            loaded = cls.from_pretrained(base.name_or_path, *model_args, config=config, **base.load_arguments(kwargs))
            model = loaded[0] if isinstance(loaded, tuple) else loaded
            model.load_adapter(path, adapter_name=adapter_name, adapter_kwargs=hub)
            return loaded
        wants_info = kwargs.pop("output_loading_info", False)
        checkpoint = read_checkpoint(cls, path, config, kwargs)
        model, info = super().from_pretrained(  # type: ignore[misc]
            checkpoint.path, *model_args, config=checkpoint.config, output_loading_info=True, **checkpoint.kwargs
        )
        check_loading_info(info, checkpoint.source)
        check_loaded_weights(model, checkpoint.source)
        if path is not None:
            model.config.name_or_path = str(path)
        model.checkpoint_commit = checkpoint.commit
        return (model, info) if wants_info else model

    def load_adapter(self, peft_model_id: Any = None, *args: Any, **kwargs: Any) -> Any:
        """
        As transformers' `load_adapter`, but refuses an adapter that does not fit, is incomplete or pickled.

        Raises:
            DrafterCheckpointError: The adapter cannot be used with this model; the message says why.
        """
        if peft_model_id is not None:
            adapter_kwargs = kwargs.get("adapter_kwargs") or {}
            check_adapter_fits(self, peft_model_id, hub_arguments({**kwargs, **adapter_kwargs}))
        info = super().load_adapter(peft_model_id, *args, **kwargs)  # type: ignore[misc]
        check_loaded_weights(self, str(peft_model_id))
        return info


@dataclass
class CheckpointToLoad:
    """
    What to call transformers' own `from_pretrained` with.

    Attributes:
        path: Directory or repository; None if `kwargs` has a `state_dict`.
        config: The configuration, in this package's form.
        kwargs: Further arguments.
        source: Where it all comes from, for messages.
        commit: The Hub commit that was read; None for a directory.
    """

    path: Any
    config: PreTrainedConfig
    kwargs: dict[str, Any]
    source: str
    commit: str | None = None


def read_checkpoint(model_class: Any, path: Any, config: Any, kwargs: dict[str, Any]) -> CheckpointToLoad:
    """
    Resolves a checkpoint, translates its configuration and tensor names if another project wrote it, and compares the
    tensors it holds with those the model has.

    Args:
        model_class (`type[PreTrainedModel]`): The class to be built.
        path (`str`, `os.PathLike` or `None`): Directory or Hub repository; None with a `state_dict` in `kwargs`.
        config (`PreTrainedConfig`, `str` or `None`): As in transformers' `from_pretrained`.
        kwargs (`dict`): The other arguments of `from_pretrained`; not modified.

    Raises:
        DrafterCheckpointError: The files are not a complete drafter of a known format.
    """
    source = str(path) if path is not None else "the given `state_dict`"
    hub = hub_arguments(kwargs)
    if not isinstance(config, PreTrainedConfig):
        config_source = path if config is None else config
        # The model's dtype: a configuration would keep "auto" as its own.
        dtypes: dict[str, Any] = {name: kwargs.pop(name) for name in ("dtype", "torch_dtype") if name in kwargs}
        config, kwargs = model_class.config_class.from_pretrained(config_source, return_unused_kwargs=True, **kwargs)
        kwargs = {**kwargs, **dtypes}
    # Loading the configuration used up the Hub arguments, which the weights need as well.
    kwargs = {**hub, **kwargs, "use_safetensors": True}
    state_dict = kwargs.get("state_dict")
    files = [] if state_dict is not None else find_weight_files(path, kwargs.get("variant"), hub)
    shapes = tensor_shapes(files) if state_dict is None else {name: tuple(t.shape) for name, t in state_dict.items()}
    refuse_foreign_tensors(shapes, source)
    native_names = {name: native_tensor_name(name) for name in shapes}
    # A quantised checkpoint holds packed weights and their scales; its loader knows which belong to what.
    if getattr(config, "quantization_config", None) is None:
        compare_shapes(model_class, config, {native_names[name]: shape for name, shape in shapes.items()}, source)
        refuse_whole_numbers(files, source)
    if any(old != new for old, new in native_names.items()):
        if state_dict is None:
            state_dict = {name: tensor for file in files for name, tensor in load_file(file).items()}
        kwargs["state_dict"] = {native_names[name]: tensor for name, tensor in state_dict.items()}
        # transformers takes either a path or tensors.
        path = None
    commit = extract_commit_hash(files[0], None) if files else None
    return CheckpointToLoad(path=path, config=config, kwargs=kwargs, source=source, commit=commit)


def refuse_whole_numbers(files: Iterable[str], source: str, names: Container[str] | None = None) -> None:
    """
    Weights stored as integers, whose scales are elsewhere, would load as zeros and ones.

    Args:
        files (`Iterable[str]`): Safetensors files.
        source (`str`): What the user called the checkpoint, for messages.
        names (`Container[str]`, *optional*): Of the tensors that are weights; by default all.

    Raises:
        DrafterCheckpointError: One is.
    """
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():
                if names is not None and name not in names:
                    continue
                dtype = handle.get_slice(name).get_dtype()
                if not dtype.startswith(("F", "BF")) and not name.endswith(DRAFT_VOCABULARY_NAME):
                    raise DrafterCheckpointError(
                        f"{source}: `{name}` is stored as {dtype}; expected floating-point weights, since config.json "
                        "has no `quantization_config`. Use a checkpoint that is not quantised, or the complete one."
                    )


def find_weight_files(path: Any, variant: str | None, hub: dict[str, Any]) -> list[str]:
    """
    The safetensors files of a directory or Hub repository.

    Raises:
        DrafterCheckpointError: There are none; pickled weights do not count. Or there is one more that matters.
    """
    if cached_file(path, MASK_EMBEDDING_NAME, _raise_exceptions_for_missing_entries=False, **hub) is not None:
        raise DrafterCheckpointError(
            f"{path} has a `{MASK_EMBEDDING_NAME}`: an embedding for the mask rows that was trained on its own, where "
            "this drafter uses the target's `mask_token_id` row. Drafts made without it would be wrong; run it with "
            "SGLang or vLLM, which read it."
        )
    found: dict[str, str | None] = {}
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        stem, suffix = name.split(".", 1)
        filename = name if variant is None else f"{stem}.{variant}.{suffix}"
        found[name] = cached_file(path, filename, _raise_exceptions_for_missing_entries=False, **hub)
    if (single := found[SAFE_WEIGHTS_NAME]) is not None:
        _refuse_other_shards(path, single, found[SAFE_WEIGHTS_INDEX_NAME], hub)
        return [single]
    if (index := found[SAFE_WEIGHTS_INDEX_NAME]) is not None:
        try:
            shards, _ = get_checkpoint_shard_files(path, index, **hub)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DrafterCheckpointError(
                f"{index} does not list the weight files ({error!r}). It is damaged or not whole; download or copy it "
                "again."
            ) from error
        return list(shards)
    raise DrafterCheckpointError(
        f"{path} has no `{SAFE_WEIGHTS_NAME}`. Pickled weights (.bin, .pt, .ckpt) are never opened, because opening "
        "one can run code. Convert them to safetensors where you trust them, or use another checkpoint."
    )


def _refuse_other_shards(path: Any, single: str, index: str | None, hub: dict[str, Any]) -> None:
    """A drafter saved in shards over one in a single file leaves that, which would be loaded in its place."""
    if index is None:
        return
    try:
        shards, _ = get_checkpoint_shard_files(path, index, **hub)
    except (OSError, AttributeError, KeyError, TypeError, ValueError):
        return  # an index without its shards is what a single file saved over them leaves
    for shard in filter(os.path.isfile, shards):
        with safe_open(shard, framework="pt") as new, safe_open(single, framework="pt") as old:
            names = set(old.keys())
            if not all(name in names and new.get_tensor(name).equal(old.get_tensor(name)) for name in new.keys()):
                raise DrafterCheckpointError(
                    f"{path} holds other weights in `{os.path.basename(single)}` than in the shards of "
                    f"`{os.path.basename(index)}`: one is of an earlier save. Remove that one."
                )


def check_loading_info(info: Mapping[str, Any], source: str) -> None:
    """Raises [`DrafterCheckpointError`] if transformers' loader left a tensor out or found one too many."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if entries := info.get(kind):
            raise DrafterCheckpointError(
                f"{source}: `{kind}` of the loading report is {listed_names(map(str, entries))}; it must be empty. "
                "Use a complete checkpoint."
            )


def check_loaded_weights(model: PreTrainedModel, source: str) -> None:
    """Raises [`DrafterCheckpointError`] if a parameter of the model holds a NaN or an infinity."""
    for name, tensor in model.named_parameters():
        # Parameters offloaded to disk have no values here; packed quantised ones are integers or eight-bit floats.
        if tensor.is_meta or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            continue
        if not torch.isfinite(tensor).all():
            raise DrafterCheckpointError(
                f"{source}: `{name}` has NaN or infinite values. The training run diverged or the file is damaged; "
                "use an earlier checkpoint."
            )


def compare_shapes(
    model_class: Any, config: PreTrainedConfig, shapes: Mapping[str, tuple[int, ...]], source: str
) -> None:
    """
    Raises [`DrafterCheckpointError`] unless a checkpoint holds exactly the tensors that a model has, in their shapes.

    Args:
        model_class (`type[PreTrainedModel]`): The class to be built.
        config (`PreTrainedConfig`): Its configuration.
        shapes (`Mapping[str, tuple]`): Shape of each tensor of the checkpoint, under this package's names.
        source (`str`): Where they came from, for error messages.
    """
    try:
        with torch.device("meta"):
            # A copy, because building a model settles attention fields of its config.
            model = model_class(copy.deepcopy(config))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DrafterCheckpointError(
            f"{source}: config.json describes no model that can be built ({error!r}). Correct `hidden_act`, "
            "`rope_parameters`, `dtype`, or what the message names."
        ) from error
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if missing := sorted(expected.keys() - shapes.keys()):
        hint = "The file is incomplete, or config.json belongs to another drafter."
        if all(name.startswith("length_head.") for name in missing):
            hint = "Remove `length_head_config` from config.json to use the drafter without a length head."
        raise DrafterCheckpointError(f"{source}: {len(missing)} tensors are missing: {listed_names(missing)}. {hint}")
    if unexpected := sorted(shapes.keys() - expected.keys()):
        hint = "It is another kind of drafter, or config.json does not describe it."
        if all(name.startswith("length_head.") for name in unexpected):
            hint = "Describe the length head in config.json under `length_head_config`."
        raise DrafterCheckpointError(
            f"{source}: {len(unexpected)} tensors have no place in the drafter: {listed_names(unexpected)}. {hint}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise DrafterCheckpointError(
                f"{source}: `{name}` has shape {list(shapes[name])}, but config.json asks for {list(shape)}. Correct "
                "the sizes in config.json or use the weights that belong to it."
            )


__all__ = [
    "ADAPTER_CONFIG_NAME",
    "CheckpointToLoad",
    "StrictCheckpointMixin",
    "check_loaded_weights",
    "check_loading_info",
    "compare_shapes",
    "find_weight_files",
    "read_checkpoint",
    "refuse_whole_numbers",
]
