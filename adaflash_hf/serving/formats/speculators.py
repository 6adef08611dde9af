"""speculators' format: layer ids one higher, the layers' fields nested, the verifier named, the layout declared."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from ...checkpoint_formats import ZLAB_ARCHITECTURE, native_config_dict
from ...configuration_dflash_drafter import DFlashDrafterConfig
from ...errors import DrafterCheckpointError, DrafterExportError, InvalidInputError
from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .draft_vocabulary import draft_vocabulary_tensors, read_draft_vocabulary
from .engine_limits import refuse_what_is_lost
from .own_copies import drop_copies
from .reading import Reading, ReadOptions, plan_tensors
from .stored_checkpoint import StoredCheckpoint
from .target_files import TargetFiles
from .tensor_dtypes import dtype_name
from .zlab import transformer_fields, without_extras


__all__ = ["FORMAT"]

_ARCHITECTURE = "DFlashSpeculator"
_KIND = "dflash"
# The release whose schema is written.
_SCHEMA_VERSION = "0.9.0"
_MARKS = ("speculators_model_type", "speculators_config", "aux_hidden_state_layer_ids")


def _matches(checkpoint: StoredCheckpoint) -> bool:
    return any(checkpoint.config.get(name) for name in _MARKS)


def _read(checkpoint: StoredCheckpoint, options: ReadOptions) -> Reading:
    fields = checkpoint.config
    kind, layers = fields.get("speculators_model_type"), fields.get("transformer_layer_config")
    if kind != _KIND:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `speculators_model_type` is {kind!r}; only {_KIND!r} is a DFlash drafter. Use the "
            "project that wrote it."
        )
    if not isinstance(layers, dict) or not fields.get("aux_hidden_state_layer_ids"):
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `transformer_layer_config` or `aux_hidden_state_layer_ids` is missing. Use a "
            "complete checkpoint."
        )
    verifier = _verifier_name(fields)
    config = _native_fields(checkpoint, layers, _depth(checkpoint, options, verifier))
    config["target_model_name_or_path"] = verifier
    vocabulary = read_draft_vocabulary(checkpoint, config, options)
    used = vocabulary.used or drop_copies(checkpoint, options, verifier)
    sources, dropped = plan_tensors(checkpoint, config, set_aside=used)
    return Reading(config=config, sources=sources, dropped=dropped | used, computed=vocabulary.tensors)


def _native_fields(checkpoint: StoredCheckpoint, layers: dict[str, Any], depth: int) -> dict[str, Any]:
    fields = checkpoint.config
    ids = [int(i) - 1 for i in fields["aux_hidden_state_layer_ids"]]
    if min(ids) < 0:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `aux_hidden_state_layer_ids` is {fields['aux_hidden_state_layer_ids']}; 0 stands "
            "for the target's embeddings, which this drafter cannot read. Use the project that wrote it."
        )
    zlab = {
        **_complete(layers),
        "architectures": [ZLAB_ARCHITECTURE],
        "dtype": fields.get("dtype", layers.get("dtype")),
        "block_size": fields.get("block_size"),
        "num_target_layers": depth,
        "dflash_config": {
            "mask_token_id": fields.get("mask_token_id"),
            "target_layer_ids": ids,
            "sample_from_anchor": bool(fields.get("sample_from_anchor")),
            "target_hidden_size": fields.get("target_hidden_size"),
        },
    }
    config = native_config_dict(zlab, checkpoint.source)
    is_sliding = "sliding_attention" in (config.get("layer_types") or [])
    if "is_causal" not in layers:
        # Full layers are bidirectional there whatever the flag says; sliding ones are causal unless it is set.
        config["is_causal"] = False if is_sliding and fields.get("sliding_window_non_causal") else None
    return config


def _complete(layers: dict[str, Any]) -> dict[str, Any]:
    """The layers' fields with what their configuration class fills in."""
    given = dict(layers)
    return AutoConfig.for_model(given.pop("model_type", "qwen3"), **given).to_dict()


def _verifier_name(fields: dict[str, Any]) -> str | None:
    verifier = (fields.get("speculators_config") or {}).get("verifier") or {}
    return verifier.get("name_or_path")


def _depth(checkpoint: StoredCheckpoint, options: ReadOptions, verifier: str | None) -> int:
    """The format does not say how deep the target is; exports of this package do, else the target is asked."""
    if depth := checkpoint.config.get("num_target_layers"):
        return int(depth)
    target = options.target or (TargetFiles(verifier) if verifier else None)
    try:
        if target is not None:
            return int(target.config.num_hidden_layers)
        reason = "names no verifier"
    except InvalidInputError as error:
        reason = f"names a verifier that cannot be read: {error}"
    raise DrafterCheckpointError(
        f"{checkpoint.source}: the format does not say how many layers the target has, and it {reason}. Pass --target."
    )


def _write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    notes = refuse_what_is_lost(bundle.config, "speculators")
    name = bundle.config.target_model_name_or_path
    if name is None:
        raise DrafterExportError("speculators' format names the target, which this drafter does not. Pass --target.")
    holds, rounding = without_extras(bundle, options, keep_length_head=False, keep_draft_vocabulary=True)
    holds.config.output_multiplier, holds.config.final_logit_softcapping = 1.0, None
    extra = draft_vocabulary_tensors(bundle, options, with_members=True)
    tensors = {key: tensor for key, tensor in holds.tensors.items() if key != "draft_token_ids"} | extra
    return DrafterForm(
        config=_speculators_config(holds.config, name, dtype_name(holds.tensors), _architectures(options)),
        tensors=tensors,
        holds=holds,
        notes=notes + rounding,
    )


def _architectures(options: WriteOptions) -> list[str]:
    """The verifier's; speculators leaves the list empty where it does not know, and so does this."""
    return list(options.target.full_config.architectures or []) if options.target is not None else []


def _speculators_config(
    config: DFlashDrafterConfig, target: str, dtype: str, target_architectures: list[str]
) -> dict[str, Any]:
    layers = {**transformer_fields(config), "architectures": None, "dtype": dtype}
    fields: dict[str, Any] = {
        "architectures": [_ARCHITECTURE],
        # One more than the native ids: the number of layers run before the features are taken.
        "aux_hidden_state_layer_ids": [i + 1 for i in config.target_layer_ids],
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        "dtype": dtype,
        "mask_token_id": config.mask_token_id,
        # Not part of the schema; a reader needs it to check the layer ids.
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.block_layout == "anchor_first",
        "sliding_window_non_causal": _is_non_causal(config),
        "speculators_config": {
            "algorithm": _KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": config.draft_length,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": target_architectures, "name_or_path": target},
        },
        "speculators_model_type": _KIND,
        "speculators_version": _SCHEMA_VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers,
    }
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    return fields


def _is_non_causal(config: DFlashDrafterConfig) -> bool:
    """Of the sliding layers. True without any: vLLM 0.32 otherwise makes the full layers causal."""
    sliding = [i for i in range(config.num_hidden_layers) if config.layer_types[i] == "sliding_attention"]
    return not any(config.is_causal_layer(i) for i in sliding)


FORMAT = CheckpointFormat(name="speculators", title="speculators (dflash)", matches=_matches, read=_read, write=_write)
