"""This package's own format, as `save_pretrained` writes it: the only one that holds everything a drafter can have."""

from __future__ import annotations

from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .reading import Reading, ReadOptions, plan_tensors
from .stored_checkpoint import StoredCheckpoint
from .tensor_dtypes import cast_tensors, dtype_name


__all__ = ["FORMAT"]

_MODEL_TYPE = "dflash_drafter"


def matches(checkpoint: StoredCheckpoint) -> bool:
    """Whether a checkpoint is in this format."""
    return checkpoint.config.get("model_type") == _MODEL_TYPE


def read(checkpoint: StoredCheckpoint, options: ReadOptions) -> Reading:
    """Reads the configuration as it is; fused and prefixed tensors are tolerated."""
    del options
    config = dict(checkpoint.config)
    sources, dropped = plan_tensors(checkpoint, config)
    return Reading(config=config, sources=sources, dropped=dropped)


def write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    """Takes everything over, in the dtype it has unless another is asked for."""
    tensors, notes = cast_tensors(bundle.tensors, options.dtype)
    config = type(bundle.config).from_dict(bundle.config.to_dict())
    config.dtype = dtype_name(tensors)
    config.architectures = ["DFlashDrafterModel"]
    holds = DrafterBundle(config, tensors, bundle.source)
    fields = {**config.to_diff_dict(), "dtype": config.dtype}
    return DrafterForm(config=fields, tensors=tensors, holds=holds, notes=notes)


FORMAT = CheckpointFormat(name="native", title="adaflash_hf (native)", matches=matches, read=read, write=write)
