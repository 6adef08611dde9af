"""Reads the `config.json` and tensor names of DFlash checkpoints that other projects write.

Three are read: z-lab's `DFlashDraftModel`, the AdaFlash authors', which is z-lab's plus a length head, and the export
for the SGLang plugin, which is z-lab's plus a length head under this package's names. The others look alike and mean
something else (layer ids shifted by one, a different row-to-token layout, tensors of their own), so each is refused by
name; `adaflash convert` rewrites those that can be. Only names and numbers are handled here: no tensor is opened.
"""

import re
from collections.abc import Iterable
from typing import Any

from .errors import DrafterCheckpointError


NATIVE_MODEL_TYPE = "dflash_drafter"
ZLAB_ARCHITECTURE = "DFlashDraftModel"
PLUGIN_ARCHITECTURE = "AdaFlashDraftModel"
# transformers' Qwen3Config, which z-lab's checkpoints are loaded with, fills these in when they are absent.
ZLAB_DEFAULTS = {"head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0}
ZLAB_BLOCK_SIZE = 16
COPIED_FIELDS = (
    "attention_bias attention_dropout bos_token_id dtype eos_token_id head_dim hidden_act hidden_size "
    "initializer_range intermediate_size max_position_embeddings num_attention_heads num_hidden_layers "
    "num_key_value_heads pad_token_id quantization_config rms_norm_eps target_model_name_or_path torch_dtype "
    "vocab_size"
).split()
OPTIONAL_DFLASH_FIELDS = "final_logit_softcapping input_embedding_scale output_multiplier target_hidden_size".split()
TENSOR_RENAMES = (
    (re.compile(r"^model\.(?=(?:fc|hidden_norm|norm|layers|length_head|thresh_head_two_model)\.)"), ""),
    (re.compile(r"^thresh_head_two_model\."), "length_head."),
)
USE_ANOTHER = "Use a checkpoint in z-lab's `DFlashDraftModel` format or one saved by this package."
CONVERT = "Rewrite it with `adaflash convert`."
# Words in the reasons below by which a format is known that `adaflash convert` reads.
CONVERTIBLE = ("speculators", "DeepSpec", "TorchSpec", "fused projections")

# What each foreign format is recognised by, and why reading it as DFlash would go wrong.
FOREIGN_ARCHITECTURES = (
    (r"DFlash2", "it is a DFlash2 drafter, with causal convolutions and a candidate selector that DFlash lacks"),
    (r"Domino", "it is a Domino drafter, whose rows predict shifted tokens"),
    (r"DSpark", "it is a DSpark/DeepSpec drafter, which owns an embedding and an LM head and is anchor-first"),
    (r"Speculator", "it is in speculators' format, whose layer ids are one higher than DFlash's"),
    (r"MuseGlimmer", "it is transformers' own Muse Glimmer assistant; load it with transformers"),
    (r"DFlashForCausalLM", "it is verl-speco's format, which owns an embedding"),
)
FOREIGN_FIELDS = (
    ("speculators_model_type", "it is in speculators' format, whose layer ids are one higher than DFlash's"),
    ("speculators_config", "it is in speculators' format, whose layer ids are one higher than DFlash's"),
    ("aux_hidden_state_layer_ids", "it is in speculators' format, whose layer ids are one higher than DFlash's"),
    ("target_num_hidden_layers", "it is TorchSpec's format, where `num_target_layers` counts captured layers"),
    ("num_context_layers", "it is verl-speco's format, where `num_target_layers` may count captured layers"),
    ("markov_rank", "it is a DSpark/DeepSpec drafter, which owns an embedding and an LM head and is anchor-first"),
    ("selector_rank", "it is a DFlash2 drafter, with a candidate selector that DFlash lacks"),
    ("conv_kernel_size", "it is a DFlash2 drafter, with causal convolutions that DFlash lacks"),
    ("shift_label", "it is a Domino drafter, whose rows predict shifted tokens"),
    ("attention_sink_bias", "its attention has sink biases, which this drafter lacks"),
)
FOREIGN_TENSORS = (
    (r"(?:attention|mlp)_conv\.|candidate_selector\.", "a DFlash2 drafter's convolutions or candidate selector"),
    (r"context_proj\.|context_norm\.|final_norm\.", "TorchSpec's names, whose config counts layers differently"),
    (r"embed_tokens\.|lm_head\.", "an embedding or LM head of the drafter's own, as DeepSpec and verl-speco write"),
    (r"(?:^|\.)(?:t2d|d2t)$", "a reduced draft vocabulary, as speculators writes"),
    (r"markov_head\.|confidence_head\.", "DSpark heads"),
    (r"domino", "Domino tensors"),
    (r"mask_embedding", "a mask embedding of its own, where this drafter uses the target's `mask_token_id` row"),
    (r"qkv_proj\.|gate_up_proj\.", "fused projections"),
    (r"encoder\.", "transformers' Muse Glimmer names"),
)


def native_config_dict(config_dict: dict[str, Any], source: str = "this checkpoint") -> dict[str, Any]:
    """
    Translates a drafter's `config.json` into the fields of [`DFlashDrafterConfig`]; one of this format is returned
    as it is.

    Args:
        config_dict (`dict`): The parsed `config.json`; not modified.
        source (`str`): Where it came from, for error messages.

    Raises:
        DrafterCheckpointError: It belongs to a format that is not read, or contradicts itself.
    """
    if not config_dict or config_dict.get("model_type") == NATIVE_MODEL_TYPE or not _is_foreign(config_dict):
        return config_dict
    _refuse_foreign_config(config_dict, source)
    nested = config_dict.get("dflash_config") or {}
    # z-lab's order of look-up: the nested value first, then the top-level one.
    fields = {**config_dict, **nested}
    for name in ("mask_token_id", "num_target_layers"):
        if fields.get(name) is None:
            raise DrafterCheckpointError(
                f"{source}: `{name}` is neither in `dflash_config` nor at the top level of config.json, and it cannot "
                "be guessed. Add it (the target's number of decoder layers; the id of the mask token's embedding row)."
            )
    native: dict[str, Any] = {"model_type": NATIVE_MODEL_TYPE}
    native.update({name: config_dict[name] for name in COPIED_FIELDS if name in config_dict})
    native.setdefault("head_dim", ZLAB_DEFAULTS["head_dim"])
    native.setdefault("num_key_value_heads", native.get("num_attention_heads"))
    native.setdefault("rms_norm_eps", ZLAB_DEFAULTS["rms_norm_eps"])
    native.setdefault("max_position_embeddings", ZLAB_DEFAULTS["max_position_embeddings"])
    native["rope_parameters"] = _rope_parameters(config_dict, source)
    native["block_size"] = fields.get("block_size", ZLAB_BLOCK_SIZE)
    native["mask_token_id"] = fields["mask_token_id"]
    native["num_target_layers"] = fields["num_target_layers"]
    native["target_layer_ids"] = fields.get("target_layer_ids")
    _check_depth(native, source)
    is_anchor_first = fields.get("sample_from_anchor") or fields.get("query_zero_predicts_next")
    native["block_layout"] = "anchor_first" if is_anchor_first else "anchor_then_masks"
    native.update({name: fields[name] for name in OPTIONAL_DFLASH_FIELDS if fields.get(name) is not None})
    native.update(_attention_fields(config_dict, nested))
    native.update(_extra_fields(config_dict, nested))
    return native


def native_tensor_name(name: str) -> str:
    """The name under which this package stores the tensor that another writer calls `name`."""
    for pattern, replacement in TENSOR_RENAMES:
        name = pattern.sub(replacement, name)
    return name


def refuse_foreign_tensors(names: Iterable[str], source: str) -> None:
    """Raises [`DrafterCheckpointError`] if tensor names show a format that is not read."""
    for name in sorted(names):
        for pattern, meaning in FOREIGN_TENSORS:
            if re.search(pattern, name):
                raise DrafterCheckpointError(
                    f"{source}: the tensor `{name}` belongs to {meaning}; this drafter has no place for it. "
                    f"{_next_step(meaning)}"
                )


def _is_foreign(config_dict: dict[str, Any]) -> bool:
    """A `config.json` names its architecture or type; a plain dictionary of our own fields does neither."""
    return any(config_dict.get(name) for name in ("architectures", "model_type", "dflash_config"))


def _refuse_foreign_config(config_dict: dict[str, Any], source: str) -> None:
    architectures = config_dict.get("architectures") or []
    nested = config_dict.get("dflash_config") or {}
    reason = next(
        (why for pattern, why in FOREIGN_ARCHITECTURES for name in architectures if re.search(pattern, name)), None
    ) or next((why for field, why in FOREIGN_FIELDS if {**config_dict, **nested}.get(field)), None)
    if reason is None and config_dict.get("model_type") == "dflash":
        reason = "it is TorchSpec's or verl-speco's format, where `num_target_layers` may count captured layers"
    if reason is None and nested.get("attention_value_scale", 1) not in (None, 1, 1.0):
        reason = f"its attention scales values by {nested['attention_value_scale']}, which this drafter does not"
    if reason is None and config_dict.get("is_neox_style") is False:
        reason = "it uses interleaved RoPE (`is_neox_style` is false), which this drafter does not"
    if reason is None and nested.get("thresh_head_direct_len") is False:
        reason = "its length head does not predict the length directly (`thresh_head_direct_len` is false)"
    if reason is None and not {ZLAB_ARCHITECTURE, PLUGIN_ARCHITECTURE}.intersection(architectures):
        reason = f"`architectures` is {architectures!r} and `model_type` is {config_dict.get('model_type')!r}"
    if reason is not None:
        raise DrafterCheckpointError(f"{source} cannot be read as a DFlash drafter: {reason}. {_next_step(reason)}")


def _next_step(reason: str) -> str:
    return CONVERT if any(word in reason for word in CONVERTIBLE) else USE_ANOTHER


def _check_depth(native: dict[str, Any], source: str) -> None:
    """TorchSpec and older verl-speco write the number of captured layers where z-lab writes the target's depth."""
    depth, ids = native["num_target_layers"], native["target_layer_ids"]
    if isinstance(depth, int) and ids and all(isinstance(i, int) for i in ids) and max(ids) >= depth:
        raise DrafterCheckpointError(
            f"{source}: `num_target_layers` is {depth} but `target_layer_ids` is {ids}. The field is the target's "
            "depth; some writers put the number of captured layers there. Set it to the target's `num_hidden_layers`."
        )


def _extra_fields(config_dict: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """What this package's plugin export adds to z-lab's format, or the length head that the authors' flags declare."""
    added = config_dict.get("adaflash_config") or {}
    fields = {"length_head_config": added.get("length_head"), "draft_vocab_size": added.get("draft_vocab_size")}
    if any(value is not None for value in fields.values()):
        return fields
    if nested.get("use_thresh_head_two_model"):
        size = nested.get("thresh_head_bottleneck_dim", 256)
        return {"length_head_config": {"head_type": "mean_last_residual", "bottleneck_size": size}}
    return {}


def _rope_parameters(config_dict: dict[str, Any], source: str) -> dict[str, Any]:
    """Merges the two spellings of RoPE: `rope_parameters` (transformers 5), `rope_theta` and `rope_scaling` (4)."""
    parameters = dict(config_dict.get("rope_parameters") or config_dict.get("rope_scaling") or {})
    if "type" in parameters:
        parameters.setdefault("rope_type", parameters.pop("type"))
    theta = config_dict.get("rope_theta")
    if theta is not None and parameters.get("rope_theta", theta) != theta:
        raise DrafterCheckpointError(
            f"{source}: `rope_theta` is {theta} but `rope_parameters` says {parameters['rope_theta']}. Remove the "
            "wrong one from config.json; the drafter's base must be the one it was trained with."
        )
    parameters.setdefault("rope_theta", ZLAB_DEFAULTS["rope_theta"] if theta is None else theta)
    parameters.setdefault("rope_type", "default")
    return parameters


def _attention_fields(config_dict: dict[str, Any], nested: dict[str, Any]) -> dict[str, Any]:
    """Window and causality: `use_swa` puts a two-sided window on every layer, `causal` is about every layer."""
    num_layers = config_dict.get("num_hidden_layers", 0)
    if nested.get("use_swa"):
        window = nested.get("swa_window_size", config_dict.get("sliding_window"))
        return {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": window, "is_causal": False}
    fields: dict[str, Any] = {
        "layer_types": config_dict.get("layer_types"),
        "sliding_window": config_dict.get("sliding_window"),
        "is_causal": config_dict.get("is_causal", nested.get("is_causal")),
    }
    if fields["layer_types"] is None and config_dict.get("use_sliding_window"):
        first = config_dict.get("max_window_layers", 28)
        fields["layer_types"] = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    # Everyone who reads both lets the first one win.
    is_open = fields["is_causal"] is None
    if is_open and (nested.get("causal") is not None or nested.get("causal_head") is not None):
        fields["is_causal"] = bool(nested.get("causal") or nested.get("causal_head"))
    return fields


__all__ = ["native_config_dict", "native_tensor_name", "refuse_foreign_tensors"]
