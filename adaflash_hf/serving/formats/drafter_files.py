"""Reads a drafter of any known format, and writes one in any: checked before it is written, and read back after."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from ...atomic_directories import directory_written_aside
from ...checkpoint_loading import DRAFT_VOCABULARY_NAME, compare_shapes, refuse_whole_numbers
from ...configuration_dflash_drafter import DFlashDrafterConfig
from ...embedded_target import without_progress_bars
from ...error_text import first_line
from ...errors import DrafterCheckpointError, DrafterExportError, InvalidInputError, OutputError
from ...hub_connection import hub_or_cache
from ...modeling_dflash_drafter import DFlashDrafterModel
from ...output_places import check_room, check_writable, writing_to
from .adapters import is_adapter, read_adapter
from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .read_back import check_bundle, check_written
from .reading import Reading, ReadOptions, apply_options
from .registry import detect_format, format_called
from .stored_checkpoint import CONFIG_NAME, StoredCheckpoint, open_checkpoint
from .target_files import TargetFiles


__all__ = ["convert_drafter", "interpret", "read_drafter", "write_drafter"]

# Room on the disk beyond the weights themselves.
_MARGIN_BYTES = 16 * 2**20


def read_drafter(
    path: str | os.PathLike[str],
    options: ReadOptions | None = None,
    hub: Mapping[str, Any] | None = None,
    source_format: str | None = None,
) -> DrafterBundle:
    """
    Reads a drafter of any known format from a directory or the Hub. An adapter is merged into its drafter.

    Args:
        path (`str` or `os.PathLike`): Directory or Hub id.
        options (`ReadOptions`, *optional*): What the files leave open.
        hub (`Mapping`, *optional*): Arguments of transformers' `cached_file`, such as `revision` and `token`.
        source_format (`str`, *optional*): Take the files for this format; by default it is recognised.

    Raises:
        InvalidInputError: There is no such checkpoint.
        DrafterCheckpointError: It is damaged, or not a drafter that this package can represent.
    """
    with hub_or_cache(path):
        if is_adapter(os.fspath(path), hub or {}):
            bundle = read_adapter(os.fspath(path), hub or {})
        else:
            bundle = _read(open_checkpoint(path, hub), options or ReadOptions(), source_format)
    check_bundle(bundle)
    return bundle


def _read(checkpoint: StoredCheckpoint, options: ReadOptions, source_format: str | None) -> DrafterBundle:
    form = detect_format(checkpoint) if source_format is None else format_called(source_format)
    config, reading = interpret(checkpoint, form, options)
    return DrafterBundle(
        config=config,
        tensors=_load(checkpoint, reading),
        source=checkpoint.source,
        notes=reading.notes + [f"`{name}` is left out: {why}." for name, why in reading.dropped.items()],
    )


def interpret(
    checkpoint: StoredCheckpoint, form: CheckpointFormat, options: ReadOptions
) -> tuple[DFlashDrafterConfig, Reading]:
    """
    Works out what a checkpoint is, from its config.json and the headers of its tensors.

    Args:
        checkpoint (`StoredCheckpoint`): The files.
        form (`CheckpointFormat`): Their format.
        options (`ReadOptions`): What the files leave open.

    Raises:
        DrafterCheckpointError: It contradicts itself, lacks tensors, or cannot be represented.
    """
    if form.read is None:
        raise DrafterCheckpointError(f"{checkpoint.source}: the format {form.name} is not read.")
    try:
        reading = form.read(checkpoint, options)
        apply_options(reading.config, options, checkpoint.source)
        config = DFlashDrafterConfig.from_dict({**reading.config, "model_type": DFlashDrafterConfig.model_type})
    except DrafterCheckpointError:
        raise
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        # transformers' own configuration classes raise these for values of a wrong type.
        reason = first_line(error)
        raise DrafterCheckpointError(f"{checkpoint.source}: config.json makes no drafter: {reason}.") from error
    if getattr(config, "quantization_config", None) is not None:
        raise DrafterCheckpointError(
            f"{checkpoint.source} is quantised (`quantization_config`), and only full-precision weights can be "
            "rewritten. Use the checkpoint it was made from."
        )
    weights = {source.name for name, source in reading.sources.items() if name != DRAFT_VOCABULARY_NAME}
    refuse_whole_numbers({checkpoint.tensors[name].file for name in weights}, checkpoint.source, weights)
    shapes = {name: _shape_of(checkpoint, reading, name) for name in reading.sources}
    shapes |= {name: tuple(tensor.shape) for name, tensor in reading.computed.items()}
    try:
        compare_shapes(DFlashDrafterModel, config, shapes, checkpoint.source)
    except RuntimeError as error:
        # Sizes beyond what torch can count: no memory is taken for this, so nothing else stops them.
        raise DrafterCheckpointError(
            f"{checkpoint.source}: config.json makes no drafter: its sizes are impossible ({first_line(error)})."
        ) from error
    return config, reading


def write_drafter(
    bundle: DrafterBundle,
    path: str | os.PathLike[str],
    format_name: str,
    options: WriteOptions | None = None,
    *,
    force: bool = False,
) -> DrafterForm:
    """
    Writes a drafter in a format. The directory appears complete and checked, or not at all.

    Args:
        bundle (`DrafterBundle`): The drafter.
        path (`str` or `os.PathLike`): Directory to make.
        format_name (`str`): One of `WRITABLE_FORMATS`.
        options (`WriteOptions`, *optional*): Target and dtype.
        force (`bool`): Replace a drafter that is there.

    Returns:
        `DrafterForm`: what was written, with notes on what was left out.

    Raises:
        DrafterExportError: The format cannot hold the drafter, or the place cannot be written to.
    """
    form = format_called(format_name)
    out = Path(os.path.abspath(path))
    options = _with_dtype(form, options or WriteOptions())
    _check_place(out, force)
    check_bundle(bundle)
    if form.write is None:
        raise InvalidInputError(f"`format` is {format_name!r}, which is only read, not written.")
    written = form.write(_with_target(bundle, options.target), options)
    check_bundle(written.holds)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in written.tensors.values()) + _MARGIN_BYTES
    try:
        check_room(out, needed, "OUT")
        with writing_to(out, "OUT", "nothing was left behind"), directory_written_aside(out) as partial:
            _save(form, written, partial)
            check_written(partial, form, written, _read_files(options))
    except OutputError as error:
        raise DrafterExportError(str(error)) from error
    return written


def convert_drafter(
    source: str | os.PathLike[str],
    path: str | os.PathLike[str],
    format_name: str,
    read_options: ReadOptions | None = None,
    write_options: WriteOptions | None = None,
    *,
    hub: Mapping[str, Any] | None = None,
    source_format: str | None = None,
    check: Callable[[DFlashDrafterConfig], None] | None = None,
    force: bool = False,
) -> tuple[DrafterBundle, DrafterForm]:
    """
    Reads a drafter of any known format and writes it in another: what `adaflash export` and `adaflash convert` do. The
    directory appears complete and read back, or not at all.

        from adaflash_hf.serving.formats import ReadOptions, TargetFiles, WriteOptions, convert_drafter

        target = TargetFiles("org/target")
        convert_drafter(
            "runs/drafter", "runs/drafter-vllm", "vllm", ReadOptions(target=target), WriteOptions(target=target)
        )

    Args:
        source (`str` or `os.PathLike`): Directory or Hub id.
        path (`str` or `os.PathLike`): Directory to make.
        format_name (`str`):
            `"native"`, `"z-lab"`, `"adaflash-authors"`, `"speculators"`, `"sglang"`, `"sglang-plugin"` or `"vllm"`.
        read_options (`ReadOptions`, *optional*): What the files leave open.
        write_options (`WriteOptions`, *optional*): Target and dtype.
        hub (`Mapping`, *optional*): Arguments of transformers' `cached_file`.
        source_format (`str`, *optional*): Take the files for this format; by default it is recognised.
        check (`Callable`, *optional*):
            Called with the configuration before anything is written; may raise, as [`check_fit`] does.
        force (`bool`): Replace a drafter that is there.

    Returns:
        `tuple`: what was read and what was written, each with its notes.

    Raises:
        InvalidInputError: There is no such checkpoint, or the place or an option is not allowed.
        DrafterCheckpointError: The checkpoint is damaged, or not a drafter that this package can represent.
        DrafterExportError: The format cannot hold the drafter, or the place cannot be written to.
    """
    if os.path.isdir(source) and os.path.realpath(source) == os.path.realpath(path):
        raise InvalidInputError(f"`OUT` is {os.fspath(path)!r}, the drafter itself; pass another directory.")
    # Before a big checkpoint is read for nothing.
    out = Path(os.path.abspath(path))
    _check_place(out, force)
    try:
        check_writable(out, "OUT")
    except OutputError as error:
        raise DrafterExportError(str(error)) from error
    bundle = read_drafter(source, read_options, hub, source_format)
    if check is not None:
        check(bundle.config)
    named = _with_target(bundle, None if read_options is None else read_options.target)
    return bundle, write_drafter(named, path, format_name, write_options, force=force)


def _shape_of(checkpoint: StoredCheckpoint, reading: Reading, name: str) -> tuple[int, ...]:
    source = reading.sources[name]
    shape = checkpoint.tensors[source.name].shape
    return shape if source.rows is None else (source.rows[1] - source.rows[0], *shape[1:])


def _load(checkpoint: StoredCheckpoint, reading: Reading) -> dict[str, torch.Tensor]:
    tensors = dict(reading.computed)
    for name, source in reading.sources.items():
        tensor = checkpoint.load(source.name)
        tensors[name] = tensor if source.rows is None else tensor[slice(*source.rows)].clone()
    return tensors


def _with_dtype(form: CheckpointFormat, options: WriteOptions) -> WriteOptions:
    if form.dtype is None:
        return options
    if options.dtype not in (None, form.dtype):
        raise InvalidInputError(
            f"`dtype` is {options.dtype}, but {form.title} runs drafters in {form.dtype} only. Leave it out."
        )
    return WriteOptions(target=options.target, dtype=form.dtype)


def _with_target(bundle: DrafterBundle, target: TargetFiles | None) -> DrafterBundle:
    """A drafter that names its target and its vocabulary, if the target was given."""
    if target is None:
        return bundle
    fields = bundle.config.to_dict()
    fields["target_model_name_or_path"] = fields["target_model_name_or_path"] or target.name
    if fields["vocab_size"] is None:
        fields["vocab_size"] = target.config.vocab_size
    return replace(bundle, config=DFlashDrafterConfig.from_dict(fields))


def _read_files(options: WriteOptions) -> ReadOptions:
    return ReadOptions(target=options.target)


def _check_place(out: Path, force: bool) -> None:
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir() or out.is_symlink():
        raise InvalidInputError(f"`OUT` is {str(out)!r}, which is there and is no directory; pass another name.")
    entries = [entry.name for entry in out.iterdir()]
    if not entries:
        return
    if CONFIG_NAME not in entries:
        raise InvalidInputError(
            f"`OUT` is {str(out)!r}, a directory that holds something else than a checkpoint ({entries[0]!r}); pass "
            "another name."
        )
    if not force:
        raise InvalidInputError(f"`OUT` is {str(out)!r}, where there is a checkpoint; pass --force to replace it.")


def _save(form: CheckpointFormat, written: DrafterForm, folder: Path) -> None:
    if form.name == "native":
        # transformers' own way also writes the sources, with which the checkpoint loads without this package.
        with torch.device("meta"):
            model = DFlashDrafterModel(written.holds.config)
        model.load_state_dict(dict(written.tensors), strict=True, assign=True)
        with without_progress_bars():
            model.save_pretrained(folder)
        return
    save_file(dict(written.tensors), folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    text = json.dumps(written.config, indent=2, sort_keys=True) + "\n"
    (folder / CONFIG_NAME).write_text(text, encoding="utf-8")
