"""What a drafter checkpoint is, what is wrong with it, and what each engine will do with it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..configuration_dflash_drafter import DFlashDrafterConfig
from ..errors import AdaFlashError, DrafterCheckpointError, DrafterCompatibilityError
from ..hub_connection import hub_or_cache
from .engine_outlook import EngineOutlook, Outlook, engine_outlooks
from .formats.adapters import is_adapter
from .formats.checkpoint_format import CheckpointFormat
from .formats.drafter_files import interpret, read_drafter
from .formats.reading import ReadOptions
from .formats.registry import detect_format, format_called
from .formats.stored_checkpoint import StoredCheckpoint, open_checkpoint
from .target_fit import check_fit


__all__ = ["Inspection", "inspect_drafter"]


@dataclass
class Inspection:
    """
    Args:
        source (`str`): What was looked at.
        format (`str`, *optional*): Name of its format; None if it is in none that is known.
        format_title (`str`, *optional*): For people.
        size_bytes (`int`, *optional*): Of its weight files.
        parameters (`int`, *optional*): Elements of its tensors.
        dtypes (`dict[str, int]`): Tensors by dtype.
        config (`DFlashDrafterConfig`, *optional*): The drafter; None if the files make none.
        problems (`list[str]`): What is wrong. Empty for a sound drafter.
        notes (`list[str]`): What was assumed or would be left out.
        engines (`list[EngineOutlook]`): What each engine will do with the files as they are, and with the target that
            they are compared with.
        fits (`str`, *optional*): The target it was compared with, and fits.
    """

    source: str
    format: str | None = None
    format_title: str | None = None
    size_bytes: int | None = None
    parameters: int | None = None
    dtypes: dict[str, int] = field(default_factory=dict)
    config: DFlashDrafterConfig | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    engines: list[EngineOutlook] = field(default_factory=list)
    fits: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "format": self.format,
            "parameters": self.parameters,
            "size_bytes": self.size_bytes,
            "dtypes": self.dtypes,
            "drafter": None if self.config is None else describe(self.config),
            "fits": self.fits,
            "problems": self.problems,
            "notes": self.notes,
            "engines": {
                entry.engine: {"outlook": entry.outlook.value, "reason": entry.reason} for entry in self.engines
            },
        }


def describe(config: DFlashDrafterConfig) -> dict[str, Any]:
    """The facts about a drafter that tell it from another."""
    head = config.length_head_config
    return {
        "target": config.target_model_name_or_path,
        "num_target_layers": config.num_target_layers,
        "target_layer_ids": list(config.target_layer_ids),
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        "block_layout": config.block_layout,
        "draft_length": config.draft_length,
        "num_hidden_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "is_causal": [config.is_causal_layer(i) for i in range(config.num_hidden_layers)],
        "rope_parameters": dict(config.rope_parameters),
        "length_head": None if head is None else head.head_type,
    }


def inspect_drafter(
    path: str | os.PathLike[str],
    options: ReadOptions | None = None,
    hub: Mapping[str, Any] | None = None,
    format_name: str | None = None,
) -> Inspection:
    """
    Looks at a drafter checkpoint. Whatever is wrong with it is reported, not raised.

    Args:
        path (`str` or `os.PathLike`): Directory or Hub id.
        options (`ReadOptions`, *optional*): What the files leave open; with a target, the fit is checked as well.
        hub (`Mapping`, *optional*): Arguments of transformers' `cached_file`.
        format_name (`str`, *optional*): Take the files for this format.

    Raises:
        InvalidInputError: There is nothing to look at.
    """
    options, hub = options or ReadOptions(), dict(hub or {})
    result = Inspection(source=os.fspath(path))
    try:
        with hub_or_cache(path):
            if is_adapter(result.source, hub):
                _look_at_adapter(result, options, hub)
            else:
                _look_at_files(result, open_checkpoint(path, hub), options, format_name)
    except DrafterCheckpointError as error:
        result.problems.append(str(error))
    if result.config is not None and options.target is not None:
        try:
            check_fit(result.config, options.target)
            result.fits = options.target.name
        except AdaFlashError as error:
            result.problems.append(str(error))
            if isinstance(error, DrafterCompatibilityError):
                result.engines = [_with_this_target(entry, str(error)) for entry in result.engines]
    return result


def _look_at_files(
    result: Inspection, checkpoint: StoredCheckpoint, options: ReadOptions, format_name: str | None
) -> None:
    result.size_bytes = checkpoint.size_bytes
    result.parameters = sum(_elements(tensor.shape) for tensor in checkpoint.tensors.values())
    result.dtypes = dict(Counter(tensor.dtype for tensor in checkpoint.tensors.values()))
    form: CheckpointFormat | None = None
    problem: str | None = None
    try:
        form = format_called(format_name) if format_name is not None else detect_format(checkpoint)
        result.format, result.format_title = form.name, form.title
        result.config, reading = interpret(checkpoint, form, options)
        result.notes += reading.notes
        result.notes += [f"`{name}` would be left out: {why}." for name, why in reading.dropped.items()]
    except DrafterCheckpointError as error:
        problem = str(error)
        result.problems.append(problem)
    result.problems += _damage(checkpoint)
    floating = [dtype for dtype in result.dtypes if "float" in dtype]
    if len(floating) > 1:
        result.notes.append(f"The tensors are in {len(floating)} dtypes: {', '.join(floating)}.")
    name = form.name if form is not None else "unknown"
    first_problem = result.problems[0] if result.problems else None
    result.engines = engine_outlooks(checkpoint, name, result.config, problem or first_problem)


def _look_at_adapter(result: Inspection, options: ReadOptions, hub: Mapping[str, Any]) -> None:
    result.format, result.format_title = "peft", "PEFT adapter on a drafter"
    bundle = read_drafter(result.source, options, hub)
    result.config = bundle.config
    result.parameters = sum(tensor.numel() for tensor in bundle.tensors.values())
    result.dtypes = dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in bundle.tensors.values()))
    result.notes += bundle.notes
    merge = "It loads no adapters on drafters. `adaflash export` merges this one."
    result.engines = [
        EngineOutlook("adaflash", Outlook.READY),
        EngineOutlook("transformers", Outlook.PARTIAL, "Whole blocks, one prompt at a time, no recurrent targets."),
        *(EngineOutlook(engine, Outlook.REFUSES, merge) for engine in ("sglang", "sglang-plugin", "vllm")),
    ]


def _damage(checkpoint: StoredCheckpoint) -> list[str]:
    """Tensors with values that are not finite, read one after the other."""
    bad = []
    for name, stored in checkpoint.tensors.items():
        # Eight-bit floats have no arithmetic; quantised checkpoints are refused elsewhere.
        if stored.dtype in ("float16", "bfloat16", "float32", "float64"):
            if not torch.isfinite(checkpoint.load(name)).all():
                bad.append(name)
    if not bad:
        return []
    return [
        f"{checkpoint.source}: `{bad[0]}` has NaN or infinite values ({len(bad)} such tensors). The training run "
        "diverged or the file is damaged; use an earlier checkpoint."
    ]


def _with_this_target(entry: EngineOutlook, misfit: str) -> EngineOutlook:
    """What comes of a drafter that does not fit the target, where the files alone would run."""
    if entry.outlook not in (Outlook.READY, Outlook.PARTIAL):
        return entry
    if entry.engine == "adaflash":
        return EngineOutlook(entry.engine, Outlook.REFUSES, misfit)
    return EngineOutlook(
        entry.engine, Outlook.WRONG, "The drafter does not fit this target, which the engine may not notice."
    )


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
