"""The AdaFlash authors' format: z-lab's, with a length head under `thresh_head_two_model.*` and flags that say so."""

from __future__ import annotations

from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .engine_limits import refuse_what_is_lost
from .stored_checkpoint import StoredCheckpoint
from .tensor_dtypes import dtype_name
from .zlab import matches as matches_zlab
from .zlab import read, without_extras, zlab_config


__all__ = ["FORMAT"]

_PREFIX = "thresh_head_two_model."


def _matches(checkpoint: StoredCheckpoint) -> bool:
    nested = checkpoint.config.get("dflash_config") or {}
    has_head = bool(nested.get("use_thresh_head_two_model")) or any(_PREFIX in name for name in checkpoint.tensors)
    return matches_zlab(checkpoint) and has_head


def _write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    notes = refuse_what_is_lost(bundle.config, "adaflash-authors")
    holds, rounding = without_extras(bundle, options, keep_length_head=True)
    config = {**zlab_config(holds.config), "dtype": dtype_name(holds.tensors)}
    head = holds.config.length_head_config
    assert head is not None
    config["dflash_config"].update(
        use_thresh_head_two_model=True,
        thresh_head_bottleneck_dim=head.bottleneck_size,
        thresh_head_direct_len=True,
    )
    tensors = {name.replace("length_head.", _PREFIX): tensor for name, tensor in holds.tensors.items()}
    return DrafterForm(config=config, tensors=tensors, holds=holds, notes=notes + rounding)


FORMAT = CheckpointFormat(
    name="adaflash-authors", title="AdaFlash (authors')", matches=_matches, read=read, write=_write
)
