"""z-lab's DFlash format, which z-lab's own loop, SGLang and vLLM read: Qwen3 fields and a nested `dflash_config`.

Only drafters whose row k predicts the token at anchor + k have a place in it; its readers take that for granted.
"""

from __future__ import annotations

from typing import Any

from ...checkpoint_formats import PLUGIN_ARCHITECTURE, ZLAB_ARCHITECTURE, native_config_dict
from ...configuration_dflash_drafter import DFlashDrafterConfig
from .checkpoint_format import CheckpointFormat, DrafterBundle, DrafterForm, WriteOptions
from .draft_vocabulary import read_draft_vocabulary
from .engine_limits import refuse_what_is_lost
from .reading import Reading, ReadOptions, plan_tensors
from .stored_checkpoint import StoredCheckpoint
from .tensor_dtypes import cast_tensors, dtype_name


__all__ = ["FORMAT", "matches", "read", "transformer_fields", "without_extras", "write_for", "zlab_config"]

# What Qwen3Config has under the same name.
_SHARED_FIELDS = (
    "attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size initializer_range "
    "intermediate_size max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads pad_token_id "
    "rms_norm_eps vocab_size"
).split()


def matches(checkpoint: StoredCheckpoint) -> bool:
    """Whether a checkpoint is in z-lab's format, or in one that only adds a length head to it."""
    architectures = checkpoint.config.get("architectures") or []
    return bool({ZLAB_ARCHITECTURE, PLUGIN_ARCHITECTURE}.intersection(architectures))


def read(checkpoint: StoredCheckpoint, options: ReadOptions) -> Reading:
    """Translates the configuration; tensors have native names up to a prefix and fusion."""
    config = native_config_dict(checkpoint.config, checkpoint.source)
    vocabulary = read_draft_vocabulary(checkpoint, config, options)
    sources, dropped = plan_tensors(checkpoint, config, set_aside=vocabulary.used)
    return Reading(
        config=config,
        sources=sources,
        dropped=dropped | vocabulary.used,
        notes=_layout_notes(checkpoint, config),
        computed=vocabulary.tensors,
    )


def transformer_fields(config: DFlashDrafterConfig) -> dict[str, Any]:
    """The fields that describe the layers, as Qwen3Config reads them in transformers 4 and 5."""
    scaling = {name: value for name, value in config.rope_parameters.items() if name != "rope_theta"}
    is_scaled = scaling.get("rope_type", "default") != "default"
    fields: dict[str, Any] = {"model_type": "qwen3"}
    fields.update({name: getattr(config, name) for name in _SHARED_FIELDS})
    fields.update(
        layer_types=list(config.layer_types),
        sliding_window=config.sliding_window,
        # Qwen3Config forgets the window without this, and the engines then refuse or ignore the sliding layers.
        use_sliding_window=config.sliding_window is not None,
        max_window_layers=config.num_hidden_layers,
        rope_parameters=dict(config.rope_parameters),
        rope_theta=config.rope_parameters["rope_theta"],
        rope_scaling=scaling if is_scaled else None,
        tie_word_embeddings=False,
        use_cache=True,
    )
    if config.is_causal is not None:
        fields["is_causal"] = config.is_causal
    return fields


def zlab_config(config: DFlashDrafterConfig) -> dict[str, Any]:
    """The config.json of z-lab's format."""
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        # Layer outputs, counted from zero, as in the native configuration.
        "target_layer_ids": list(config.target_layer_ids),
        # Declares the layout, which most of the format's writers leave open; vLLM reads it.
        "sample_from_anchor": False,
    }
    # SGLang looks for these here only.
    if config.output_multiplier != 1:
        nested["output_multiplier"] = config.output_multiplier
    if config.final_logit_softcapping is not None:
        nested["final_logit_softcapping"] = config.final_logit_softcapping
    if config.input_embedding_scale != 1:
        nested["input_embedding_scale"] = config.input_embedding_scale
    fields = {
        "architectures": [ZLAB_ARCHITECTURE],
        **transformer_fields(config),
        "block_size": config.block_size,
        "dflash_config": nested,
        "num_target_layers": config.num_target_layers,
    }
    if config.target_hidden_size != config.hidden_size:
        fields["target_hidden_size"] = config.target_hidden_size
    if config.target_model_name_or_path is not None:
        fields["target_model_name_or_path"] = config.target_model_name_or_path
    return fields


def without_extras(
    bundle: DrafterBundle, options: WriteOptions, keep_length_head: bool, keep_draft_vocabulary: bool = False
) -> tuple[DrafterBundle, list[str]]:
    """
    A drafter reduced to what a format holds, in the dtype asked for.

    Args:
        bundle (`DrafterBundle`): The drafter.
        options (`WriteOptions`): Has the dtype.
        keep_length_head (`bool`): Whether the format holds a length head.
        keep_draft_vocabulary (`bool`): Whether the format holds a draft vocabulary.

    Returns:
        `tuple`: the reduced drafter, and notes on rounding.
    """
    fields = bundle.config.to_dict()
    tensors = dict(bundle.tensors)
    if not keep_length_head:
        fields["length_head_config"] = None
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("length_head.")}
    if not keep_draft_vocabulary:
        fields["draft_vocab_size"] = None
        tensors.pop("draft_token_ids", None)
    tensors, notes = cast_tensors(tensors, options.dtype)
    config = DFlashDrafterConfig.from_dict({**fields, "dtype": dtype_name(tensors)})
    return DrafterBundle(config, tensors, bundle.source), notes


def write_for(reader: str, bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    """
    The format without heads, for one of its readers.

    Args:
        reader (`str`): One of `engine_limits.READERS`.
        bundle (`DrafterBundle`): The drafter.
        options (`WriteOptions`): Target and dtype.
    """
    notes = refuse_what_is_lost(bundle.config, reader)
    holds, rounding = without_extras(bundle, options, keep_length_head=False)
    config = {**zlab_config(holds.config), "dtype": dtype_name(holds.tensors)}
    return DrafterForm(config=config, tensors=holds.tensors, holds=holds, notes=notes + rounding)


def _write(bundle: DrafterBundle, options: WriteOptions) -> DrafterForm:
    return write_for("z-lab", bundle, options)


def _layout_notes(checkpoint: StoredCheckpoint, config: dict[str, Any]) -> list[str]:
    fields = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
    if any(name in fields for name in ("sample_from_anchor", "query_zero_predicts_next")):
        return []
    note = "The block layout is not declared; 'anchor_then_masks' is assumed, as for all of z-lab's checkpoints."
    if config["block_size"] == _DEEPSPEC_BLOCK_SIZE:
        note += (
            f" A block of {_DEEPSPEC_BLOCK_SIZE} is DeepSpec's, whose drafters are 'anchor_first': if next to nothing "
            "is accepted, convert it with --block-layout anchor_first."
        )
    return [note]


_DEEPSPEC_BLOCK_SIZE = 7

FORMAT = CheckpointFormat(name="z-lab", title="z-lab DFlash", matches=matches, read=read, write=_write)
