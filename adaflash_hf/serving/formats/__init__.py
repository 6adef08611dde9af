"""Checkpoint formats of DFlash drafters: one file each, with checks that all share."""

from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .drafter_files import convert_drafter, interpret, read_drafter, write_drafter
from .reading import Reading, ReadOptions
from .registry import FORMATS, READABLE_FORMATS, WRITABLE_FORMATS, detect_format, format_called
from .stored_checkpoint import StoredCheckpoint, open_checkpoint
from .target_files import TargetFiles


__all__ = [
    "FORMATS",
    "READABLE_FORMATS",
    "WRITABLE_FORMATS",
    "CheckpointFormat",
    "DrafterBundle",
    "DrafterForm",
    "ReadOptions",
    "Reading",
    "StoredCheckpoint",
    "TargetFiles",
    "WriteOptions",
    "convert_drafter",
    "detect_format",
    "format_called",
    "interpret",
    "open_checkpoint",
    "read_drafter",
    "write_drafter",
]
