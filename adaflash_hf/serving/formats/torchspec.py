"""TorchSpec's format: names of its own for the projection and the norms, and `num_target_layers` counts features.

Its checkpoints are `.pt` or distributed files; only those rewritten as safetensors by its own script can be read.
"""

from __future__ import annotations

import re
from typing import Any

from ...checkpoint_formats import ZLAB_ARCHITECTURE, native_config_dict
from ...configuration_dflash_drafter import build_target_layer_ids
from ...errors import DrafterCheckpointError
from .checkpoint_format import CheckpointFormat
from .own_copies import drop_copies
from .reading import Reading, ReadOptions, plan_tensors
from .stored_checkpoint import StoredCheckpoint


__all__ = ["FORMAT"]

_RENAMES = (
    (re.compile(r"^draft_model\."), ""),
    (re.compile(r"^context_proj\."), "fc."),
    (re.compile(r"^context_norm\."), "hidden_norm."),
    (re.compile(r"^final_norm\."), "norm."),
)
_PROJECTION = re.compile(r"^(?:draft_model\.)?context_proj\.weight$")
# What its configuration class fills in, where z-lab's would fill in something else.
_DEFAULTS = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
_DEFAULT_FEATURES = 5
_DEFAULT_DEPTH = 36
_HEADS = ("markov_head.", "confidence_head.")


def _matches(checkpoint: StoredCheckpoint) -> bool:
    has_names = any(_PROJECTION.match(name) for name in checkpoint.tensors)
    return has_names or "target_num_hidden_layers" in checkpoint.config


def _read(checkpoint: StoredCheckpoint, options: ReadOptions) -> Reading:
    nested = checkpoint.config.get("dflash_config") or {}
    fields = {**checkpoint.config, **{name: value for name, value in nested.items() if value is not None}}
    if fields.get("markov_rank") or any(name.startswith(_HEADS[0]) for name in checkpoint.tensors):
        raise DrafterCheckpointError(
            f"{checkpoint.source}: its drafts depend on a Markov head, which a DFlash drafter has no place for. Run "
            "it with an engine that has DSPARK."
        )
    ids, depth = _layer_ids(checkpoint, fields, options)
    fields.pop("dflash_config", None)
    fields.pop("target_num_hidden_layers", None)
    fields.pop("markov_rank", None)
    zlab = {
        **_DEFAULTS,
        **fields,
        "architectures": [ZLAB_ARCHITECTURE],
        "model_type": "qwen3",
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        "num_target_layers": depth,
        "target_layer_ids": ids,
    }
    if isinstance(fields.get("rope_parameters"), dict):
        zlab["rope_theta"] = fields["rope_parameters"].get("rope_theta", zlab["rope_theta"])
    config = native_config_dict(zlab, checkpoint.source)
    # Its training script holds the block size; nothing in the files does, unless they were rewritten for others.
    config["block_size"] = fields.get("block_size")
    used = drop_copies(checkpoint, options, config.get("target_model_name_or_path"))
    heads = [name for name in checkpoint.tensors if name.startswith(_HEADS[1])]
    used |= dict.fromkeys(heads, "the confidence head has no place in a drafter; drafting does not need it")
    sources, dropped = plan_tensors(checkpoint, config, _RENAMES, set_aside=used)
    notes = [f"TorchSpec's `num_target_layers` = {fields.get('num_target_layers')} became a target depth of {depth}."]
    return Reading(config=config, sources=sources, dropped=dropped | used, notes=notes)


def _layer_ids(checkpoint: StoredCheckpoint, fields: dict[str, Any], options: ReadOptions) -> tuple[list[int], int]:
    """
    Ids and the target's depth. `num_target_layers` is a count of features by TorchSpec's class and a depth in configs
    written for z-lab's; the projection's width says how many features there are.
    """
    stored = next((name for name in checkpoint.tensors if _PROJECTION.match(name)), None)
    if stored is None:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `context_proj.weight` is missing. Use a complete checkpoint."
        )
    width = checkpoint.tensors[stored].shape[-1]
    target_hidden_size = fields.get("target_hidden_size") or fields.get("hidden_size")
    if not target_hidden_size or width % target_hidden_size:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `{stored}` has {width} columns, which is no multiple of the target's hidden size "
            f"{target_hidden_size}. Correct `target_hidden_size` in config.json."
        )
    num_features = width // target_hidden_size
    given = fields.get("num_target_layers", _DEFAULT_FEATURES)
    depth = fields.get("target_num_hidden_layers")
    if depth is None and given != num_features:
        depth = given
    if depth is None:
        target = options.target
        depth = _DEFAULT_DEPTH if target is None else target.config.num_hidden_layers
    ids = fields.get("target_layer_ids") or build_target_layer_ids(depth, num_features)
    if len(ids) != num_features:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `target_layer_ids` is {ids}, but `{stored}` takes {num_features} layers' outputs. "
            "Correct `target_layer_ids` in config.json."
        )
    return list(ids), int(depth)


FORMAT = CheckpointFormat(name="torchspec", title="TorchSpec", matches=_matches, read=_read)
