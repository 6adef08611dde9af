"""DeepSpec's format: the layout is anchor-first though no file says so, and embedding and LM head are its own.

DeepSpec's DFlash is its DSpark class without a Markov head. The class always drafts from the anchor's row on, and
holds frozen copies of the target's embedding and LM head.
"""

from __future__ import annotations

from ...checkpoint_formats import ZLAB_ARCHITECTURE, native_config_dict
from ...errors import DrafterCheckpointError
from .checkpoint_format import CheckpointFormat
from .own_copies import drop_copies
from .reading import Reading, ReadOptions, plan_tensors
from .stored_checkpoint import StoredCheckpoint


__all__ = ["FORMAT"]

_ARCHITECTURE = "Qwen3DSparkModel"
_CONFIDENCE_HEAD = "confidence_head."
_ELSEWHERE = "Run it with DeepSpec, SGLang's DSPARK or vLLM's dspark."
# Fields of heads, and what marks the format; none has a counterpart in the native configuration.
_OWN_FIELDS = (
    "confidence_head_with_markov",
    "enable_confidence_head",
    "markov_head_type",
    "markov_rank",
    "num_anchors",
)


def _matches(checkpoint: StoredCheckpoint) -> bool:
    return any("DSpark" in name for name in checkpoint.config.get("architectures") or [])


def _read(checkpoint: StoredCheckpoint, options: ReadOptions) -> Reading:
    fields = {name: value for name, value in checkpoint.config.items() if name not in _OWN_FIELDS}
    _refuse_variants(checkpoint)
    if fields.get("sample_from_anchor") is None:
        fields["sample_from_anchor"] = True
    config = native_config_dict({**fields, "architectures": [ZLAB_ARCHITECTURE]}, checkpoint.source)
    used = drop_copies(checkpoint, options, config.get("target_model_name_or_path"))
    heads = [name for name in checkpoint.tensors if name.startswith(_CONFIDENCE_HEAD)]
    used |= dict.fromkeys(heads, "the confidence head has no place in a drafter; drafting does not need it")
    sources, dropped = plan_tensors(checkpoint, config, set_aside=used)
    notes = ["The layout is 'anchor_first', as all of DeepSpec's drafters are; config.json does not declare it."]
    return Reading(config=config, sources=sources, dropped=dropped | used, notes=notes)


def _refuse_variants(checkpoint: StoredCheckpoint) -> None:
    fields = checkpoint.config
    architectures = fields.get("architectures") or []
    if _ARCHITECTURE not in architectures:
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `architectures` is {architectures}; of DeepSpec's drafters only {_ARCHITECTURE} "
            f"has the layers of a DFlash drafter. {_ELSEWHERE}"
        )
    if fields.get("markov_rank"):
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `markov_rank` is {fields['markov_rank']}: its drafts depend on a Markov head, "
            f"which a DFlash drafter has no place for. {_ELSEWHERE}"
        )
    if -1 in (fields.get("target_layer_ids") or []):
        raise DrafterCheckpointError(
            f"{checkpoint.source}: `target_layer_ids` is {fields['target_layer_ids']}; -1 stands for the target's "
            f"embeddings, which this drafter cannot read. {_ELSEWHERE}"
        )


FORMAT = CheckpointFormat(name="deepspec", title="DeepSpec (DSpark class)", matches=_matches, read=_read)
