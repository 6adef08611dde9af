"""The formats by name, and which of them a checkpoint is in."""

from __future__ import annotations

from ...checkpoint_formats import native_config_dict
from ...errors import DrafterCheckpointError, InvalidInputError
from . import adaflash_authors, deepspec, native, sglang, sglang_plugin, speculators, torchspec, vllm, zlab
from .checkpoint_format import CheckpointFormat
from .stored_checkpoint import StoredCheckpoint


__all__ = ["FORMATS", "READABLE_FORMATS", "WRITABLE_FORMATS", "detect_format", "format_called"]

# In the order of recognition: whoever adds something to another format comes before it.
_MODULES = (native, speculators, torchspec, deepspec, sglang_plugin, adaflash_authors, zlab, sglang, vllm)

FORMATS: dict[str, CheckpointFormat] = {module.FORMAT.name: module.FORMAT for module in _MODULES}
READABLE_FORMATS: tuple[str, ...] = tuple(name for name, form in FORMATS.items() if form.read is not None)
WRITABLE_FORMATS: tuple[str, ...] = tuple(name for name, form in FORMATS.items() if form.write is not None)


def detect_format(checkpoint: StoredCheckpoint) -> CheckpointFormat:
    """
    Finds the format of a checkpoint.

    Args:
        checkpoint (`StoredCheckpoint`): Its config.json and tensor names.

    Raises:
        DrafterCheckpointError: It is in none that is read; the message says which, where that can be told.
    """
    for form in FORMATS.values():
        if form.matches is not None and form.matches(checkpoint):
            return form
    # Knows formats that are not read by name, and refuses the rest.
    config = {"architectures": [], **checkpoint.config, "model_type": _model_type(checkpoint)}
    native_config_dict(config, checkpoint.source)
    raise DrafterCheckpointError(f"{checkpoint.source} is in no known format of DFlash drafters.")


def format_called(name: str) -> CheckpointFormat:
    """The format of this name; [`InvalidInputError`] if there is none."""
    if name not in FORMATS:
        raise InvalidInputError(f"`format` is {name!r}; known formats are {', '.join(FORMATS)}.")
    return FORMATS[name]


def _model_type(checkpoint: StoredCheckpoint) -> str:
    """A dictionary without architecture and type would pass for native fields."""
    return str(checkpoint.config.get("model_type") or "unknown")
