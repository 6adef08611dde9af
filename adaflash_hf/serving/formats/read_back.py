"""Checks of a drafter before it is written, and of the files after: read again as their readers will."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from ...checkpoint_loading import compare_shapes
from ...configuration_dflash_drafter import DFlashDrafterConfig
from ...errors import DrafterCheckpointError, DrafterExportError
from ...modeling_dflash_drafter import DFlashDrafterModel
from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm
from .reading import ReadOptions
from .stored_checkpoint import StoredCheckpoint, open_checkpoint


__all__ = ["check_bundle", "check_written", "comparable_fields"]

# Of no meaning for what the drafter computes, or written anew by every writer.
_IGNORED_FIELDS = (
    "_name_or_path",
    "architectures",
    "auto_map",
    "dtype",
    "initializer_range",
    "return_dict",
    "transformers_version",
    "use_cache",
)
_HEAD_FIELDS = ("bottleneck_size", "head_type", "hidden_size")


def check_bundle(bundle: DrafterBundle) -> None:
    """
    Compares a drafter's tensors with those its configuration asks for, and looks for values that are not finite.

    Raises:
        DrafterCheckpointError: A tensor is missing, unexpected, mis-shaped or not finite.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in bundle.tensors.items()}
    compare_shapes(DFlashDrafterModel, bundle.config, shapes, bundle.source)
    for name, tensor in bundle.tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DrafterCheckpointError(
                f"{bundle.source}: `{name}` has NaN or infinite values. The training run diverged or the file is "
                "damaged; use an earlier checkpoint."
            )


def check_written(folder: Path, form: CheckpointFormat, written: DrafterForm, options: ReadOptions) -> None:
    """
    Reads files that were just written and compares them with what they should hold, bit for bit.

    Args:
        folder (`Path`): The directory.
        form (`CheckpointFormat`): Its format.
        written (`DrafterForm`): What was meant to be written.
        options (`ReadOptions`): Has the target, if it was given.

    Raises:
        DrafterExportError: They differ: the disk lost something, or a writer has a bug.
    """
    from .drafter_files import interpret
    from .registry import detect_format

    checkpoint = open_checkpoint(folder)
    _check_tensors(checkpoint, written, form)
    if form.name != "native":
        _check_config(checkpoint, written.holds.config)
    try:
        config, _ = interpret(checkpoint, detect_format(checkpoint), options)
    except DrafterCheckpointError as error:
        raise DrafterExportError(f"What was written as {form.title} cannot be read back: {error}") from error
    expected, found = comparable_fields(written.holds.config), comparable_fields(config)
    if differing := [name for name in expected if expected[name] != found.get(name)]:
        name = differing[0]
        raise DrafterExportError(
            f"What was written as {form.title} reads back with `{name}` = {found.get(name)!r}; expected "
            f"{expected[name]!r}. Please report this."
        )


def comparable_fields(config: DFlashDrafterConfig) -> dict[str, Any]:
    """The fields of a configuration that say what a drafter computes."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _IGNORED_FIELDS}
    if config.length_head_config is not None:
        fields["length_head_config"] = {name: getattr(config.length_head_config, name) for name in _HEAD_FIELDS}
    if "sliding_attention" not in config.layer_types:
        # Without a sliding layer the window is a number without use.
        fields["sliding_window"] = None
    return fields


def _check_tensors(checkpoint: StoredCheckpoint, written: DrafterForm, form: CheckpointFormat) -> None:
    missing, extra = (
        written.tensors.keys() - checkpoint.tensors.keys(),
        checkpoint.tensors.keys() - written.tensors.keys(),
    )
    if missing or extra:
        raise DrafterExportError(
            f"What was written as {form.title} lacks {sorted(missing)} and has {sorted(extra)} too many."
        )
    for name, tensor in written.tensors.items():
        stored = checkpoint.load(name)
        if stored.dtype != tensor.dtype or not torch.equal(stored, tensor):
            raise DrafterExportError(f"`{name}` reads back different from what was written as {form.title}.")
        if form.dtype is not None and stored.is_floating_point() and stored.dtype != form.dtype:
            raise DrafterExportError(f"`{name}` is in {stored.dtype}; {form.title} needs {form.dtype}.")


def _check_config(checkpoint: StoredCheckpoint, config: DFlashDrafterConfig) -> None:
    """Asks transformers' Qwen3Config, which the engines read the layers' fields with, what it makes of them."""
    fields = dict(checkpoint.config.get("transformer_layer_config") or checkpoint.config)
    parsed = AutoConfig.for_model(fields.pop("model_type"), **fields)
    expected = {
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": config.layer_types,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": config.rope_parameters,
        "sliding_window": config.sliding_window,
        "vocab_size": config.vocab_size,
    }
    for name, value in expected.items():
        if (found := getattr(parsed, name)) != value:
            raise DrafterExportError(
                f"The engines would read `{name}` = {found!r} from the config.json that was written; expected "
                f"{value!r}. Please report this."
            )
