"""What a drafter may have that a reader of another format cannot take: a refusal where it would go wrong silently.

Read against z-lab's dflash 0.1.0, SGLang 0.5.23, vLLM 0.32.0 and speculators 0.9.0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...configuration_dflash_drafter import DFlashDrafterConfig
from ...errors import DrafterExportError


__all__ = ["READERS", "Limit", "limits_of", "refuse_what_is_lost"]

# Who reads what is written for each of these names.
READERS = {
    "z-lab": "z-lab's loop",
    "adaflash-authors": "the AdaFlash authors' code",
    "sglang": "SGLang's DFLASH",
    "sglang-plugin": "the SGLang plugin",
    "vllm": "vLLM",
    "speculators": "speculators",
}
_ONE_PLUS_N = ("z-lab", "adaflash-authors", "sglang", "sglang-plugin", "vllm")
_ENGINES = ("sglang", "sglang-plugin", "vllm", "speculators")
_HEADLESS = ("z-lab", "sglang", "vllm", "speculators")


@dataclass(frozen=True)
class Limit:
    """
    Args:
        is_fatal (`bool`): Whether the drafter would not work, or would have next to nothing accepted.
        text (`str`): What and why, and what to do about it.
    """

    is_fatal: bool
    text: str


def limits_of(config: DFlashDrafterConfig, reader: str) -> list[Limit]:
    """
    What a reader would get wrong or leave out.

    Args:
        config (`DFlashDrafterConfig`): The drafter.
        reader (`str`): One of `READERS`.
    """
    found = [
        Limit(is_fatal, text.format(reader=READERS[reader], config=config))
        for is_fatal, readers, applies, text in _RULES
        if reader in readers and applies(config)
    ]
    return found + (_speculators_limits(config) if reader == "speculators" else [])


def refuse_what_is_lost(config: DFlashDrafterConfig, reader: str) -> list[str]:
    """
    Returns what a reader leaves out, as notes, and raises [`DrafterExportError`] for what it would get wrong.

    Args:
        config (`DFlashDrafterConfig`): The drafter.
        reader (`str`): One of `READERS`.
    """
    limits = limits_of(config, reader)
    if fatal := [limit.text for limit in limits if limit.is_fatal]:
        raise DrafterExportError(f"The drafter cannot be written for {READERS[reader]}: {' '.join(fatal)}")
    return [limit.text for limit in limits]


def _reads_last_layer(config: DFlashDrafterConfig) -> bool:
    return config.num_target_layers - 1 in config.target_layer_ids


def _has_mixed_layers(config: DFlashDrafterConfig) -> bool:
    return len(set(config.layer_types)) > 1


def _lacks_authors_head(config: DFlashDrafterConfig) -> bool:
    return config.length_head_config is None or config.length_head_config.head_type != "mean_last_residual"


# (fatal, readers, when, why)
_RULES: tuple[tuple[bool, tuple[str, ...], Callable[[DFlashDrafterConfig], bool], str], ...] = (
    (
        True,
        _ONE_PLUS_N,
        lambda config: config.block_layout == "anchor_first",
        "`block_layout` is 'anchor_first' (row k predicts the token at anchor + k + 1), and {reader} takes row k for "
        "the token at anchor + k, so that next to nothing would be accepted. Use `generate()`, or --to speculators.",
    ),
    (
        True,
        tuple(READERS),
        lambda config: config.vocab_size is None,
        "`vocab_size` is None, and {reader} needs the target's. Pass --target.",
    ),
    (
        True,
        ("sglang", "sglang-plugin", "vllm", "speculators"),
        lambda config: config.input_embedding_scale != 1,
        "`input_embedding_scale` is {config.input_embedding_scale}, and {reader} embeds the block without it.",
    ),
    (
        True,
        ("z-lab", "adaflash-authors", "sglang", "sglang-plugin"),
        lambda config: config.target_hidden_size != config.hidden_size,
        "`target_hidden_size` is {config.target_hidden_size}, and {reader} takes it to equal `hidden_size`, which is "
        "{config.hidden_size}.",
    ),
    (
        True,
        _ENGINES,
        _reads_last_layer,
        "`target_layer_ids` is {config.target_layer_ids}, of which the last is the target's last layer: transformers "
        "hands its output over after the final norm, {reader} before it. Train with an earlier layer.",
    ),
    (
        True,
        ("sglang", "sglang-plugin", "vllm"),
        lambda config: config.hidden_act != "silu",
        "`hidden_act` is {config.hidden_act!r}, and {reader} computes 'silu'.",
    ),
    (
        True,
        ("adaflash-authors",),
        _lacks_authors_head,
        "{reader} has a length head of type 'mean_last_residual', which this drafter lacks. Use --to z-lab, or train "
        "such a head.",
    ),
    (
        False,
        _HEADLESS,
        lambda config: config.length_head_config is not None,
        "The length head is left out: {reader} has no place for it and verifies whole blocks. --to sglang-plugin "
        "keeps it.",
    ),
    (
        False,
        ("z-lab", "adaflash-authors", "sglang"),
        lambda config: config.draft_vocab_size is not None,
        "The draft vocabulary of {config.draft_vocab_size} tokens is left out: {reader} drafts among all "
        "{config.vocab_size}. The output stays the target's, but drafts of untrained tokens lose acceptance.",
    ),
    (
        False,
        ("vllm",),
        _has_mixed_layers,
        "Layers with and without a sliding window are mixed, which vLLM runs with VLLM_USE_V2_MODEL_RUNNER=1 only.",
    ),
    (
        False,
        ("vllm", "speculators"),
        lambda config: config.output_multiplier != 1 or config.final_logit_softcapping is not None,
        "`output_multiplier` and `final_logit_softcapping` are unknown to {reader}. The likeliest token stays the "
        "same, so drafts do too unless they are sampled.",
    ),
)


def _speculators_limits(config: DFlashDrafterConfig) -> list[Limit]:
    """speculators knows one causality for sliding layers, none for full ones, and another kind of window."""
    layers = range(config.num_hidden_layers)
    sliding = {config.is_causal_layer(i) for i in layers if config.layer_types[i] == "sliding_attention"}
    limits = []
    if any(config.is_causal_layer(i) for i in layers if config.layer_types[i] == "full_attention"):
        limits.append(
            Limit(True, "`is_causal` is True, and speculators has no causal layers without a window. Use --to vllm.")
        )
    if sliding:
        limits.append(
            Limit(
                False,
                "speculators counts a sliding window from the anchor, not from each row; vLLM, which serves the "
                "files, counts from each row as this package does.",
            )
        )
    if True in sliding and _has_mixed_layers(config):
        limits.append(
            Limit(
                False,
                "vLLM 0.32 makes every layer of a speculators checkpoint causal when its sliding ones are. To serve "
                "with vLLM, use --to vllm.",
            )
        )
    return limits
