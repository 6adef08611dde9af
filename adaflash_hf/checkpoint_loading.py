"""Strict loading of drafter checkpoints: what is in the files is compared with what the model has, before and after.

transformers fills missing tensors with random values, ignores unexpected ones and unpickles `.bin` files; a drafter
loaded that way still runs, only with nothing accepted. Here each of these is an error.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from .checkpoint_formats import native_tensor_name, refuse_foreign_tensors
from .errors import DrafterCheckpointError


HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
NAMES_SHOWN = 5


@dataclass
class CheckpointToLoad:
    """What to call transformers' own `from_pretrained` with."""

    path: Any
    config: PreTrainedConfig
    kwargs: dict[str, Any]
    source: str


def read_checkpoint(
    model_class: type[PreTrainedModel], path: Any, config: Any, kwargs: dict[str, Any]
) -> CheckpointToLoad:
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
    kwargs = {**kwargs, "use_safetensors": True}
    source = str(path) if path is not None else "the given `state_dict`"
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if name in kwargs}
    state_dict = kwargs.get("state_dict")
    files = [] if state_dict is not None else find_weight_files(path, kwargs.get("variant"), hub)
    if not isinstance(config, PreTrainedConfig):
        config_source = path if config is None else config
        config, kwargs = model_class.config_class.from_pretrained(config_source, return_unused_kwargs=True, **kwargs)
    shapes = _shapes_in(files) if state_dict is None else {name: tuple(t.shape) for name, t in state_dict.items()}
    refuse_foreign_tensors(shapes, source)
    native_names = {name: native_tensor_name(name) for name in shapes}
    is_quantized = getattr(config, "quantization_config", None) is not None
    if not is_quantized:
        _compare_shapes(model_class, config, {native_names[name]: shape for name, shape in shapes.items()}, source)
    if any(old != new for old, new in native_names.items()):
        if state_dict is None:
            state_dict = {name: tensor for file in files for name, tensor in load_file(file).items()}
        kwargs["state_dict"] = {native_names[name]: tensor for name, tensor in state_dict.items()}
        # transformers takes either a path or tensors, and no Hub argument with the latter.
        path, kwargs = None, {name: value for name, value in kwargs.items() if name not in HUB_ARGUMENTS}
    return CheckpointToLoad(path=path, config=config, kwargs=kwargs, source=source)


def find_weight_files(path: Any, variant: str | None, hub: dict[str, Any]) -> list[str]:
    """
    The safetensors files of a directory or Hub repository.

    Raises:
        DrafterCheckpointError: There are none; pickled weights do not count.
    """
    found: dict[str, str | None] = {}
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        stem, suffix = name.split(".", 1)
        filename = name if variant is None else f"{stem}.{variant}.{suffix}"
        found[name] = cached_file(path, filename, _raise_exceptions_for_missing_entries=False, **hub)
    if (single := found[SAFE_WEIGHTS_NAME]) is not None:
        return [single]
    if (index := found[SAFE_WEIGHTS_INDEX_NAME]) is not None:
        shards, _ = get_checkpoint_shard_files(path, index, **hub)
        return list(shards)
    raise DrafterCheckpointError(
        f"{path} has no `{SAFE_WEIGHTS_NAME}`. Pickled weights (.bin, .pt, .ckpt) are never opened, because opening "
        "one can run code. Convert them to safetensors where you trust them, or use another checkpoint."
    )


def check_loading_info(info: Mapping[str, Any], source: str) -> None:
    """Raises [`DrafterCheckpointError`] if transformers' loader left a tensor out or found one too many."""
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if entries := info.get(kind):
            raise DrafterCheckpointError(
                f"{source}: `{kind}` of the loading report is {_shorten(map(str, entries))}; it must be empty. Use a "
                "complete checkpoint."
            )


def check_loaded_weights(model: PreTrainedModel, source: str) -> None:
    """Raises [`DrafterCheckpointError`] if a parameter of the model holds a NaN or an infinity."""
    for name, tensor in model.named_parameters():
        # Parameters offloaded to disk have no values here; packed quantized ones are integers.
        if tensor.is_meta or not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            continue
        if not torch.isfinite(tensor).all():
            raise DrafterCheckpointError(
                f"{source}: `{name}` has NaN or infinite values. The training run diverged or the file is damaged; "
                "use an earlier checkpoint."
            )


def _shapes_in(files: list[str]) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes, from the files' headers alone."""
    shapes = {}
    for file in files:
        with safe_open(file, framework="pt") as handle:
            shapes.update({name: tuple(handle.get_slice(name).get_shape()) for name in handle.keys()})
    return shapes


def _compare_shapes(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, shapes: dict[str, tuple[int, ...]], source: str
) -> None:
    with torch.device("meta"):
        # A copy, because building a model settles attention fields of its config.
        model = model_class(copy.deepcopy(config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, unexpected = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing:
        hint = "The file is incomplete, or config.json belongs to another drafter."
        if all(name.startswith("length_head.") for name in missing):
            hint = "Remove `length_head_config` from config.json to use the drafter without a length head."
        raise DrafterCheckpointError(f"{source}: {len(missing)} tensors are missing: {_shorten(missing)}. {hint}")
    if unexpected:
        hint = "It is another kind of drafter, or config.json does not describe it."
        if all(name.startswith("length_head.") for name in unexpected):
            hint = "Describe the length head in config.json under `length_head_config`."
        raise DrafterCheckpointError(
            f"{source}: {len(unexpected)} tensors have no place in the drafter: {_shorten(unexpected)}. {hint}"
        )
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise DrafterCheckpointError(
                f"{source}: `{name}` has shape {list(shapes[name])}, but config.json asks for {list(shape)}. Correct "
                "the sizes in config.json or use the weights that belong to it."
            )


def _shorten(names: Any) -> str:
    names = list(names)
    rest = len(names) - NAMES_SHOWN
    return ", ".join(f"`{name}`" for name in names[:NAMES_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


__all__ = ["CheckpointToLoad", "check_loaded_weights", "check_loading_info", "find_weight_files", "read_checkpoint"]
