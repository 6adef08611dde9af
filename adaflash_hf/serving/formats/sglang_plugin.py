"""For this package's SGLang plugin, algorithm ADAFLASH: as for DFLASH, with length head and draft vocabulary.

The contract with the plugin, version 1. config.json is that of z-lab's format, except that

- `architectures` is `["AdaFlashDraftModel"]`, so that an SGLang without the plugin refuses it by name;
- `adaflash_config` is `{"format_version": 1, "length_head": null or {"head_type": "mean_linear" or
  "mean_last_residual", "bottleneck_size": int}, "draft_vocab_size": null or int}`.

The weights are one `model.safetensors` in bfloat16: the tensors of a DFlash drafter, and with a length head those of
[`LengthHeadModel`] under the prefix `length_head.` (H is the hidden size, b the bottleneck):

- both types: `length_head.down.bias` [b], `length_head.out.weight` [1, b], `length_head.out.bias` [1];
- `mean_linear`: `length_head.down.weight` [b, H]; SiLU of it per row, then the mean over all rows of the block, the
  anchor's included, then `out` and a sigmoid in float32;
- `mean_last_residual`: `length_head.down.weight` [b, 2H] on the mean over the rows beside the last row, SiLU, then
  x + SiLU(`length_head.res.0.weight` [b, b] x + `length_head.res.0.bias` [b]), then `out` and a sigmoid in float32.

The result estimates (accepted drafts + 1) / block_size; the head's input is the drafter's output after its final norm.
Blocks are always `anchor_then_masks`. With a `draft_vocab_size` n there is `draft_token_ids` [n], int64 and ascending:
the drafter multiplies the target's LM head for these rows alone and drafts the token that the likeliest of them is.
"""

from __future__ import annotations

import torch

from ...checkpoint_formats import PLUGIN_ARCHITECTURE
from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .engine_limits import refuse_what_is_lost
from .reading import Reading, ReadOptions
from .stored_checkpoint import StoredCheckpoint
from .tensor_dtypes import dtype_name
from .zlab import read as read_zlab
from .zlab import without_extras, zlab_config


__all__ = ["FORMAT", "FORMAT_VERSION"]

FORMAT_VERSION = 1


def _matches(checkpoint: StoredCheckpoint) -> bool:
    return PLUGIN_ARCHITECTURE in (checkpoint.config.get("architectures") or [])


def _read(checkpoint: StoredCheckpoint, options: ReadOptions) -> Reading:
    reading = read_zlab(checkpoint, options)
    reading.notes = []  # the contract fixes the layout
    return reading


def _write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    notes = refuse_what_is_lost(bundle.config, "sglang-plugin")
    holds, rounding = without_extras(bundle, options, keep_length_head=True, keep_draft_vocabulary=True)
    head = holds.config.length_head_config
    if head is None:
        notes.append("The drafter has no length head; the plugin verifies whole blocks, as DFLASH does.")
    described = None if head is None else {"head_type": head.head_type, "bottleneck_size": head.bottleneck_size}
    config = {
        **zlab_config(holds.config),
        "architectures": [PLUGIN_ARCHITECTURE],
        "adaflash_config": {
            "format_version": FORMAT_VERSION,
            "length_head": described,
            "draft_vocab_size": holds.config.draft_vocab_size,
        },
        "dtype": dtype_name(holds.tensors),
    }
    return DrafterForm(config=config, tensors=holds.tensors, holds=holds, notes=notes + rounding)


FORMAT = CheckpointFormat(
    name="sglang-plugin",
    title="SGLang with the adaflash_hf plugin, algorithm ADAFLASH",
    matches=_matches,
    read=_read,
    write=_write,
    dtype=torch.bfloat16,
)
