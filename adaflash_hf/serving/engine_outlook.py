"""What each engine will do with a checkpoint as it is: run it, leave something out, refuse it, or go wrong silently.

Read against transformers 5.24, SGLang 0.5.23 and vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ..checkpoint_formats import (
    PLUGIN_ARCHITECTURE,
    ZLAB_ARCHITECTURE,
    native_config_dict,
    native_tensor_name,
    refuse_foreign_tensors,
)
from ..checkpoint_loading import compare_shapes
from ..configuration_dflash_drafter import DFlashDrafterConfig
from ..modeling_dflash_drafter import DFlashDrafterModel
from .formats.engine_limits import limits_of
from .formats.stored_checkpoint import StoredCheckpoint


__all__ = ["ENGINES", "EngineOutlook", "Outlook", "engine_outlooks"]

_HEADS = ("length_head.", "thresh_head_two_model.", "model.length_head.", "model.thresh_head_two_model.")
_OF_THE_TARGET = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
_DSPARK = "Qwen3DSparkModel"


class Outlook(StrEnum):
    """What comes of it."""

    READY = "ready"
    PARTIAL = "partial"
    REFUSES = "refuses"
    WRONG = "wrong"


@dataclass(frozen=True)
class EngineOutlook:
    """
    Args:
        engine (`str`): One of `ENGINES`.
        outlook (`Outlook`): What comes of it.
        reason (`str`): Why, and what to do; empty if there is nothing to say.
    """

    engine: str
    outlook: Outlook
    reason: str = ""


@dataclass(frozen=True)
class _Subject:
    """What is looked at: the files, and the drafter in them if they make one."""

    checkpoint: StoredCheckpoint
    format_name: str
    config: DFlashDrafterConfig | None
    problem: str | None

    @property
    def architectures(self) -> list[str]:
        return list(self.checkpoint.config.get("architectures") or [])

    def names_that(self, test: Callable[[str], bool]) -> list[str]:
        return [name for name in self.checkpoint.tensors if test(name)]

    @property
    def has_head(self) -> bool:
        return bool(self.names_that(lambda name: name.startswith(_HEADS)))

    @property
    def missing(self) -> list[str]:
        """Tensors of the drafter's body that are not there under a name the engines know."""
        if self.config is None:
            return []
        known = {name.removeprefix("model.") for name in self.checkpoint.tensors}
        return [name for name in expected_names(self.config) if name not in known]


def engine_outlooks(
    checkpoint: StoredCheckpoint, format_name: str, config: DFlashDrafterConfig | None, problem: str | None
) -> list[EngineOutlook]:
    """
    Asks for each engine.

    Args:
        checkpoint (`StoredCheckpoint`): The files.
        format_name (`str`): Their format.
        config (`DFlashDrafterConfig`, *optional*): The drafter in them; None if they make none.
        problem (`str`, *optional*): Why they make none.
    """
    subject = _Subject(checkpoint, format_name, config, problem)
    return [EngineOutlook(engine, *ask(subject)) for engine, ask in ENGINES.items()]


def expected_names(config: DFlashDrafterConfig) -> list[str]:
    """Names of the tensors that every DFlash drafter of this configuration has, heads excluded."""
    block = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    block += [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    layers = [f"layers.{i}.{name}.weight" for i in range(config.num_hidden_layers) for name in block]
    return ["fc.weight", "hidden_norm.weight", "norm.weight", *layers]


Answer = tuple[Outlook, str]


def _ask_adaflash(subject: _Subject) -> Answer:
    if subject.problem is not None:
        return Outlook.REFUSES, subject.problem
    if reason := _direct_problem(subject.checkpoint):
        return Outlook.REFUSES, f"{reason}"
    return Outlook.READY, ""


def _ask_transformers(subject: _Subject) -> Answer:
    outlook, reason = _ask_adaflash(subject)
    if outlook is Outlook.REFUSES or subject.config is None:
        return outlook, reason
    if subject.config.block_layout == "anchor_first":
        return Outlook.WRONG, "`block_layout` is 'anchor_first', and it takes every row for the token before."
    if subject.config.input_embedding_scale != 1:
        return Outlook.WRONG, "It embeds the block without `input_embedding_scale`."
    left_out = ["Whole blocks, one prompt at a time, no recurrent targets; needs this package or trust_remote_code."]
    if subject.has_head:
        left_out.append("The length head is not used.")
    return Outlook.PARTIAL, " ".join(left_out)


def _ask_sglang(subject: _Subject) -> Answer:
    fields = subject.checkpoint.config
    if ZLAB_ARCHITECTURE not in subject.architectures or fields.get("model_type") in (None, "dflash"):
        return Outlook.REFUSES, f"{_unknown_architecture(subject)} {_export_hint(subject, 'sglang')}"
    if missing := subject.missing:
        return (
            Outlook.WRONG,
            f"It starts without {missing[0]} ({len(missing)} tensors), which stay uninitialised, and says nothing. "
            f"{_export_hint(subject, 'sglang')}",
        )
    if owned := subject.names_that(lambda name: name.removeprefix("model.") in _OF_THE_TARGET):
        return Outlook.WRONG, f"It ignores {owned[0]} and uses the target's. {_export_hint(subject, 'sglang')}"
    if reason := _forgotten_window(fields):
        return Outlook.REFUSES, f"{reason} {_export_hint(subject, 'sglang')}"
    outlook, reason = _from_limits(subject, "sglang")
    if outlook is Outlook.READY and subject.has_head:
        return Outlook.PARTIAL, "It ignores the length head and verifies whole blocks."
    return outlook, reason


def _ask_plugin(subject: _Subject) -> Answer:
    if PLUGIN_ARCHITECTURE not in subject.architectures:
        return Outlook.REFUSES, f"{_unknown_architecture(subject)} {_export_hint(subject, 'sglang-plugin')}"
    if subject.problem is not None:
        return Outlook.REFUSES, subject.problem
    outlook, reason = _from_limits(subject, "sglang-plugin")
    if outlook is Outlook.READY and not subject.has_head:
        return Outlook.PARTIAL, "Without a length head it verifies whole blocks."
    return outlook, reason


def _ask_vllm(subject: _Subject) -> Answer:
    fields = subject.checkpoint.config
    if subject.format_name == "speculators":
        return _ask_vllm_about_speculators(subject)
    if _DSPARK in subject.architectures:
        return Outlook.READY, "With method dspark; as method dflash it cannot run."
    if ZLAB_ARCHITECTURE not in subject.architectures or fields.get("model_type") in (None, "dflash"):
        return Outlook.REFUSES, f"{_unknown_architecture(subject)} {_export_hint(subject, 'vllm')}"
    if unknown := _names_vllm_does_not_know(subject):
        return (
            Outlook.REFUSES,
            f"It has no place for {unknown[0]} ({len(unknown)} tensors). {_export_hint(subject, 'vllm')}",
        )
    if missing := subject.missing:
        return Outlook.WRONG, f"{missing[0]} is missing ({len(missing)} tensors). {_export_hint(subject, 'vllm')}"
    if reason := _forgotten_window(fields):
        return Outlook.REFUSES, f"{reason} {_export_hint(subject, 'vllm')}"
    return _from_limits(subject, "vllm")


def _ask_vllm_about_speculators(subject: _Subject) -> Answer:
    fields = subject.checkpoint.config
    if subject.problem is not None:
        return Outlook.REFUSES, subject.problem
    if fields.get("sample_from_anchor"):
        return Outlook.REFUSES, "Its method dflash does not draft from the anchor's row (`sample_from_anchor`)."
    config = subject.config
    if config is None or fields.get("sliding_window_non_causal", True):
        return Outlook.READY, ""
    if any(not config.is_causal_layer(i) for i in range(config.num_hidden_layers)):
        return (
            Outlook.WRONG,
            "`sliding_window_non_causal` is false, which vLLM 0.32 takes for causal attention in every layer, also in "
            f"those without a window. {_export_hint(subject, 'vllm')}",
        )
    return Outlook.READY, ""


ENGINES: dict[str, Callable[[_Subject], Answer]] = {
    "adaflash": _ask_adaflash,
    "transformers": _ask_transformers,
    "sglang": _ask_sglang,
    "sglang-plugin": _ask_plugin,
    "vllm": _ask_vllm,
}


def _direct_problem(checkpoint: StoredCheckpoint) -> str | None:
    """Why `from_pretrained` would not load the files as they are."""
    try:
        fields = native_config_dict(checkpoint.config, checkpoint.source)
        refuse_foreign_tensors(checkpoint.tensors, checkpoint.source)
        config = DFlashDrafterConfig.from_dict(fields)
        shapes = {native_tensor_name(name): tensor.shape for name, tensor in checkpoint.tensors.items()}
        compare_shapes(DFlashDrafterModel, config, shapes, checkpoint.source)
    except (ValueError, TypeError, KeyError, StrictDataclassError) as error:
        return " ".join(str(error).split())
    return None


def _from_limits(subject: _Subject, reader: str) -> Answer:
    if subject.config is None:
        return Outlook.WRONG, subject.problem or "The files do not make a drafter."
    limits = limits_of(subject.config, reader)
    if fatal := [limit.text for limit in limits if limit.is_fatal]:
        return Outlook.WRONG, " ".join(fatal)
    return Outlook.READY, ""


def _forgotten_window(fields: dict[str, Any]) -> str | None:
    if "sliding_attention" not in (fields.get("layer_types") or []) or fields.get("use_sliding_window"):
        return None
    if fields.get("model_type") != "qwen3":
        return None
    return "`use_sliding_window` is not true, so that Qwen3Config drops the window its sliding layers need."


def _names_vllm_does_not_know(subject: _Subject) -> list[str]:
    if subject.config is None:
        return []
    known: Iterable[str] = (*expected_names(subject.config), *_OF_THE_TARGET)
    biases = subject.config.attention_bias
    return subject.names_that(
        lambda name: name not in known and not (biases and name.endswith("_proj.bias")) and "qkv_proj" not in name
    )


def _unknown_architecture(subject: _Subject) -> str:
    fields = subject.checkpoint.config
    return f"It does not know `architectures` {subject.architectures} of type {fields.get('model_type')!r}."


def _export_hint(subject: _Subject, format_name: str) -> str:
    return "" if subject.config is None else f"Use `adaflash export --to {format_name}`."
