"""Turns the arguments of one submission into what the engine runs, by transformers' own preparation of `generate()`.

What cannot be served is refused here, in the submitting thread, before any work is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel

from ..errors import InvalidInputError, UnsupportedGenerationError
from .compatibility import unwrap_model
from .drafted_generate import DRAFT_PROPOSALS
from .engine_requests import PreparedRequest
from .generation_options import take_stop_strings
from .packed_decoding import KNOWN_INPUTS
from .request_checks import check_request, context_limit
from .stopping import StopRules
from .token_choice import is_prefix_free


__all__ = ["RequestPreparation"]

# Arguments of `generate()` that mean nothing, or something else, for one request among many.
REFUSED_ARGUMENTS = {
    "assistant_model": "the engine has its drafter already",
    "streamer": "iterate over the handle instead",
    "inputs": "it is called `input_ids` here",
    "inputs_embeds": "pass token ids",
    "cache": "the engine keeps the caches of all requests",
    "past_key_values": "the engine keeps the caches of all requests",
    "position_ids": "the tokens of a request stand at 0, 1, 2 and so on",
    "custom_generate": "the engine is the way of decoding",
    "synced_gpus": "every process runs an engine of its own",
    "token_healing": "heal the prompt first: `target.heal_tokens(input_ids, tokenizer)`",
    "speculation_type": "the engine has its drafter already",
    "length_policy": "it is the engine's, `AdaFlashEngine(..., length_policy=...)`",
    "draft_proposal": "it is the engine's, `AdaFlashEngine(..., draft_proposal=...)`",
}
WANTED_OUTPUTS = ("output_scores", "output_logits", "output_hidden_states", "output_attentions")


class RequestPreparation:
    """Prepares requests for one target.

    Args:
        target (`PreTrainedModel`): The target, possibly wrapped.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): For stop strings of requests that bring no tokenizer.
        draft_proposal (`str`): `"argmax"` or `"sample"`, how drafts of sampled requests are chosen.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: Any = None, draft_proposal: str = "argmax"):
        if draft_proposal not in DRAFT_PROPOSALS:
            raise InvalidInputError(f"`draft_proposal` is {draft_proposal!r}, expected one of {DRAFT_PROPOSALS}.")
        # A PEFT wrapper changes the model while its own `generate` runs, which must not happen beside a forward pass.
        self._target = unwrap_model(target)
        self._tokenizer = tokenizer
        self._draft_proposal = draft_proposal
        self.max_context_tokens = context_limit(self._target.config.get_text_config(decoder=True))
        self._vocab_size = self._target.get_input_embeddings().weight.shape[0]
        # Making a criterion walks over the whole vocabulary; it keeps nothing of the sequences it judges.
        self._stop_string_criterion = lru_cache(maxsize=32)(StopStringCriteria)

    def prepare(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        generation_config: GenerationConfig | None,
        seed: int | None,
        **kwargs: Any,
    ) -> PreparedRequest:
        """Prepares one request.

        Args:
            input_ids (`Sequence[int]` or `torch.Tensor` of shape `(n,)` or `(1, n)`): The prompt, without padding.
            generation_config (`GenerationConfig`, *optional*): As in `generate()`.
            seed (`int`, *optional*): Seed of the draws; taken from torch's global generator when not given.
            kwargs (`dict`): Further arguments of `generate()`.

        Returns:
            `PreparedRequest`: The prompt and what decides its tokens.

        Raises:
            InvalidInputError: If the prompt, the seed or a length is not allowed.
            UnsupportedGenerationError: If an option cannot be honoured.
        """
        ids = self._check_prompt(input_ids)
        _check_mask(kwargs.pop("attention_mask", None))
        self._refuse_arguments(generation_config, kwargs)
        generation_config, criteria = self._take_stop_strings(generation_config, kwargs)
        config, processors, criteria = self._ask_transformers(ids, generation_config, criteria, kwargs)
        rules = StopRules(criteria)
        self._check_length(ids.shape[1], rules)
        do_sample = bool(config.do_sample)
        pad = config._pad_token_tensor
        return PreparedRequest(
            prompt_ids=ids[0].tolist(),
            logits_processor=processors,
            stop_rules=rules,
            do_sample=do_sample,
            samples_drafts=do_sample and self._draft_proposal == "sample",
            seed=_checked_seed(seed) if do_sample else None,
            pad_token_id=0 if pad is None else int(pad),
            settings=_settings_of(processors) if is_prefix_free(processors) else None,
        )

    def _check_prompt(self, input_ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        try:
            ids = _tensor_of(input_ids)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise InvalidInputError(
                f"`input_ids` is a {type(input_ids).__name__} that is no list or tensor of token ids. Tokenize first "
                'and pass the ids of one prompt: `tokenizer(text)["input_ids"]`.'
            ) from error
        if ids.ndim == 2 and ids.shape[0] == 1:
            ids = ids[0]
        if ids.ndim != 1 or ids.numel() == 0 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise InvalidInputError(
                f"`input_ids` has shape {tuple(ids.shape)} and dtype {ids.dtype}; expected at least one token id of a "
                "single prompt. Submit the prompts of a batch one by one, without padding."
            )
        smallest, largest = (int(bound) for bound in ids.aminmax())
        if smallest < 0 or largest >= self._vocab_size:
            raise InvalidInputError(
                f"`input_ids` has ids from {smallest} to {largest}, but the target's token embedding has "
                f"{self._vocab_size} rows. Use the target's own tokenizer."
            )
        return ids.long()[None]

    @staticmethod
    def _refuse_arguments(generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
        for name, instead in REFUSED_ARGUMENTS.items():
            if kwargs.get(name) is not None:
                raise UnsupportedGenerationError(f"`{name}` has no place in `submit`: {instead}.")
        for name in WANTED_OUTPUTS:
            if kwargs.get(name) or getattr(generation_config, name, None):
                raise UnsupportedGenerationError(
                    f"`{name}` is on, but the engine returns tokens only. Use `generate()` for this prompt."
                )

    def _take_stop_strings(
        self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
    ) -> tuple[GenerationConfig | None, StoppingCriteriaList]:
        """Makes the criterion of stop strings here, where it can be kept for the next request."""
        criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or ())
        tokenizer = kwargs.pop("tokenizer", None) or self._tokenizer
        strings, generation_config = take_stop_strings(self._target, generation_config, kwargs)
        if strings is None:
            return generation_config, criteria
        if tokenizer is None:
            raise InvalidInputError(
                f"`stop_strings` is {strings!r}, but there is no tokenizer to find them with. Pass `tokenizer` to "
                "`submit` or to the engine."
            )
        key = (strings,) if isinstance(strings, str) else tuple(strings)
        criteria.append(self._stop_string_criterion(tokenizer, key))
        return generation_config, criteria

    def _ask_transformers(
        self,
        ids: torch.Tensor,
        generation_config: GenerationConfig | None,
        criteria: StoppingCriteriaList,
        kwargs: dict[str, Any],
    ) -> tuple[GenerationConfig, LogitsProcessorList, StoppingCriteriaList]:
        """Runs `generate()` up to where decoding would begin."""
        prepared: list[Any] = []

        def instead_of_decoding(
            model: Any,
            input_ids: torch.Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> torch.Tensor:
            cache = model_kwargs.get("cache", model_kwargs.get("past_key_values"))
            check_request(
                model,
                generation_config,
                model_kwargs,
                input_ids,
                cache,
                logits_processor,
                synced_gpus=False,
                without_drafter="call `target.generate()` for this prompt",
            )
            if len(input_ids) > 1:
                raise UnsupportedGenerationError(
                    f"`num_return_sequences` is {len(input_ids)}, but a request has one answer. Submit the prompt "
                    "several times, with different seeds."
                )
            _check_inputs({name: value for name, value in model_kwargs.items() if name in kwargs})
            prepared.extend((generation_config, logits_processor, stopping_criteria))
            return input_ids

        GenerationMixin.generate(
            self._target,
            ids.to(self._target.device),
            generation_config=generation_config,
            stopping_criteria=criteria,
            custom_generate=instead_of_decoding,
            **kwargs,
        )
        return prepared[0], prepared[1], prepared[2]

    def _check_length(self, prompt_tokens: int, rules: StopRules) -> None:
        if self.max_context_tokens is None:
            return
        total = prompt_tokens + 1 if rules.max_length is None else rules.max_length
        if max(total, prompt_tokens + 1) > self.max_context_tokens:
            room = self.max_context_tokens - prompt_tokens
            raise InvalidInputError(
                f"The prompt has {prompt_tokens} tokens and `max_new_tokens` is {total - prompt_tokens}, together "
                f"{total}, but the target's context ends at {self.max_context_tokens}. Shorten the prompt"
                + (f", or pass `max_new_tokens={room}` or less." if room > 0 else ".")
            )
        if rules.max_length is None:
            rules.max_length = self.max_context_tokens


def _tensor_of(numbers: Any) -> torch.Tensor:
    """A list becomes a tensor on the host, whatever device the user made torch's default."""
    return numbers if isinstance(numbers, torch.Tensor) else torch.as_tensor(numbers, device="cpu")


def _check_mask(mask: Any) -> None:
    """Of one unpadded prompt a mask says nothing; one that says something must not be passed over."""
    if mask is not None and not bool(_tensor_of(mask).all()):
        raise InvalidInputError(
            "`attention_mask` hides some of the prompt, but a request is a prompt without padding. Pass the tokens "
            "that count: `input_ids[attention_mask.bool()]`."
        )


def _check_inputs(given: dict[str, Any]) -> None:
    """Refuses inputs of the target that packed rows would pass over, such as images."""
    for name, value in given.items():
        # Tokenizers of some models give zeros for text.
        is_text = name.endswith("token_type_ids") and isinstance(value, torch.Tensor) and not bool(value.any())
        if value is not None and name not in KNOWN_INPUTS and not is_text:
            raise UnsupportedGenerationError(
                f"`{name}` has no place in `submit`: a request is token ids alone. Call `target.generate()` for this "
                "prompt."
            )


def _checked_seed(seed: int | None) -> int:
    if seed is None:
        return int(torch.randint(2**63 - 1, (), device="cpu"))
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
        raise InvalidInputError(f"`seed` is {seed!r}, expected an integer from 0 to 2**64 - 1.")
    return seed


def _settings_of(processors: LogitsProcessorList) -> tuple[Any, ...] | None:
    """Equal for lists that do the same to any scores; None if that cannot be said."""
    settings = []
    for processor in processors:
        values = sorted(vars(processor).items())
        if not all(isinstance(value, int | float | str | bool | None) for _, value in values):
            return None
        settings.append((type(processor), tuple(values)))
    return tuple(settings)
