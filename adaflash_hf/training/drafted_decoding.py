"""Decoding of many prompts with the help of a drafter, for making training data.

The tokens come from the engine, so rows that accept much run ahead and leave early. What training keeps beside them
(soft targets, hidden states) comes from one forward pass over each finished text. Greedy tokens are those of
`decode_batch`; sampled ones have the same distribution, and for one drafter depend on the seed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import GenerationConfig

from ..errors import UnsupportedGenerationError
from ..generation.context_features import concatenate_context_features, forward_with_features
from ..generation.engine import AdaFlashEngine
from ..generation.length_policies import LengthPolicy
from .batched_decoding import DecodedResponse, DecodingSettings, likeliest_tokens


if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..generation.engine_statistics import EngineStats
    from ..modeling_dflash_drafter import DFlashDrafterModel


__all__ = ["DraftedDecoder", "measure_response"]


class DraftedDecoder:
    """
    Decodes batches with a drafter.

    Args:
        target_model (`PreTrainedModel`):
            The target, in evaluation mode.
        drafter (`DFlashDrafterModel`):
            A drafter for it.
        batch_size (`int`):
            Most prompts at once.
        length_policy (`str` or `LengthPolicy`, *optional*, defaults to `"cost_aware"`):
            How much of a draft is verified, and whether to draft at all.

    Raises:
        UnsupportedGenerationError: the engine cannot serve this target.
    """

    def __init__(
        self,
        target_model: PreTrainedModel,
        drafter: DFlashDrafterModel,
        batch_size: int,
        length_policy: str | LengthPolicy = "cost_aware",
    ) -> None:
        self._target = target_model
        try:
            self._engine = AdaFlashEngine(
                target_model, drafter, length_policy=length_policy, max_concurrency=batch_size, max_queue=batch_size
            )
        except UnsupportedGenerationError as error:
            raise UnsupportedGenerationError(
                f"`drafter` was given, but batches of this target cannot be decoded with one ({error}). Leave it out: "
                "plain batches serve every target."
            ) from error

    @property
    def statistics(self) -> EngineStats:
        """What was accepted so far."""
        return self._engine.statistics()

    def decode(
        self, prompt_ids: Sequence[Sequence[int]], settings: DecodingSettings, seed: int
    ) -> list[DecodedResponse]:
        """
        Decode one batch of prompts to the end.

        Args:
            prompt_ids (`Sequence[Sequence[int]]`):
                At most `batch_size` prompts.
            settings (`DecodingSettings`):
                What to decode and what to keep.
            seed (`int`):
                Decides what is sampled.

        Returns:
            `list[DecodedResponse]`: in the order of the prompts.
        """
        config = _generation_config(settings)
        samples = settings.temperature > 0
        handles = [
            # Prompts of one batch must not draw the same numbers.
            self._engine.submit(ids, config, seed=seed * len(prompt_ids) + row if samples else None)
            for row, ids in enumerate(prompt_ids)
        ]
        responses = []
        for ids, handle in zip(prompt_ids, handles, strict=True):
            result = handle.result()
            if result.error is not None:
                raise result.error
            tokens = result.token_ids
            finished = bool(tokens) and tokens[-1] in settings.eos_token_ids
            responses.append(measure_response(self._target, ids, tokens, finished, settings))
        return responses


@torch.inference_mode()
def measure_response(
    target_model: PreTrainedModel,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    finished: bool,
    settings: DecodingSettings,
) -> DecodedResponse:
    """
    What `decode_batch` would have kept beside a response, by one forward pass over the whole text.

    Args:
        target_model (`PreTrainedModel`):
            The target, in evaluation mode.
        prompt_ids (`Sequence[int]`):
            The prompt.
        response_ids (`Sequence[int]`):
            The target's response.
        finished (`bool`):
            Whether it ended by itself.
        settings (`DecodingSettings`):
            What to keep.
    """
    tokens = torch.tensor(list(response_ids), dtype=torch.int32)
    layer_ids, top_k = settings.capture_layer_ids, settings.teacher_top_k
    if not layer_ids and not top_k:
        return DecodedResponse(tokens, finished)
    # The last token's own output is of no use.
    text = torch.tensor([[*prompt_ids, *response_ids][:-1]], device=target_model.device)
    logits_to_keep = len(response_ids) if top_k else 1
    output = forward_with_features(
        target_model, layer_ids, input_ids=text, use_cache=False, logits_to_keep=logits_to_keep
    )
    ids, log_probs, features = None, None, None
    if top_k:
        ids, log_probs = (torch.cat(parts) for parts in zip(*_likeliest(output.logits[0], top_k), strict=True))
    if layer_ids:
        depth = target_model.config.get_text_config().num_hidden_layers
        features = concatenate_context_features(output.hidden_states, layer_ids, depth)[0].cpu()
    return DecodedResponse(tokens, finished, ids, log_probs, features)


def _likeliest(logits: torch.Tensor, top_k: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and log-probabilities in pieces of rows, so that no float32 copy of all logits is made."""
    for rows in logits.split(64):
        ids, log_probs = likeliest_tokens(rows.float(), top_k)
        yield ids.cpu(), log_probs.cpu()


def _generation_config(settings: DecodingSettings) -> GenerationConfig:
    """
    These settings and nothing else.

    A target's own generation configuration fills in whatever is left open, so nothing is left open that would change
    a distribution.
    """
    samples = settings.temperature > 0
    sampling = (
        {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": 0, "min_p": 0.0} if samples else {}
    )
    return GenerationConfig(
        do_sample=samples,
        max_new_tokens=settings.max_new_tokens,
        # No end at all is spelled as an id that no token has.
        eos_token_id=list(settings.eos_token_ids) or -1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        typical_p=1.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        **sampling,
    )
