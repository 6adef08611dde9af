"""Random traffic for the engine: requests that arrive and are cancelled between rounds, and what they must say."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from oracle_drafter import OracleDrafter, oracle_drafter
from plain_comparison import exact_target, generate, prompt
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from adaflash_hf import AdaFlashEngine, RequestHandle
from adaflash_hf.generation.engine_requests import GenerationRequest, PreparedRequest
from adaflash_hf.generation.stopping import StopRules


NEW_TOKENS = 32
NUM_PROMPTS = 10
# Two of each kind of layer where kinds alternate.
LAYERS = {"gemma3_text": 4, "gpt_oss": 4}


@cache
def engine_target(architecture: str = "llama") -> PreTrainedModel:
    """A target of few layers that tests leave as it is."""
    layers = LAYERS.get(architecture, 2)
    overrides: dict[str, Any] = {"num_hidden_layers": layers}
    if architecture in LAYERS:
        overrides["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    return exact_target(architecture, **overrides)


def prompt_ids(index: int) -> list[int]:
    """One of `NUM_PROMPTS` prompts of 1 to 37 tokens."""
    return prompt(1 + 4 * index, seed=index)[0].tolist()


@cache
def plain_answer(architecture: str, index: int) -> tuple[int, ...]:
    """What plain `generate()` adds to a prompt: `NEW_TOKENS` tokens."""
    ids = torch.tensor([prompt_ids(index)])
    return tuple(generate(engine_target(architecture), ids, max_new_tokens=NEW_TOKENS)[0, ids.shape[1] :].tolist())


def engine_oracle(architecture: str = "llama", **overrides: Any) -> OracleDrafter:
    """A drafter that knows all plain answers and errs at every fifth position."""
    references = [[*prompt_ids(index), *plain_answer(architecture, index)] for index in range(NUM_PROMPTS)]
    fields = {"wrong_every": 5, "target_layer_ids": [0, 1], "num_hidden_layers": 1, **overrides}
    return oracle_drafter(engine_target(architecture), references, **fields)


@dataclass
class Arrival:
    """A request that the traffic submits, and after which round its owner gives up."""

    index: int
    new_tokens: int
    at_round: int
    cancel_at_round: int | None = None


def random_arrivals(seed: int, count: int, over_rounds: int, cancel_share: float = 0.25) -> list[Arrival]:
    """Requests in order of arrival."""
    chance = random.Random(seed)
    arrivals = []
    for _ in range(count):
        at = chance.randrange(over_rounds)
        cancelled = at + chance.randrange(12) if chance.random() < cancel_share else None
        arrivals.append(Arrival(chance.randrange(NUM_PROMPTS), chance.randint(1, NEW_TOKENS), at, cancelled))
    return sorted(arrivals, key=lambda arrival: arrival.at_round)


def run_traffic(engine: AdaFlashEngine, arrivals: list[Arrival], **settings: Any) -> list[RequestHandle]:
    """Submits and cancels as planned, one round at a time, until everything has ended; handles by arrival."""
    handles: list[RequestHandle] = []
    number = 0
    while len(handles) < len(arrivals) or not all(handle.is_done for handle in handles):
        for arrival in arrivals[len(handles) :]:
            if arrival.at_round > number:
                break
            handles.append(
                engine.submit(
                    prompt_ids(arrival.index), max_new_tokens=arrival.new_tokens, do_sample=False, **settings
                )
            )
        for handle, arrival in zip(handles, arrivals, strict=False):
            if arrival.cancel_at_round is not None and arrival.cancel_at_round <= number:
                handle.cancel()
        engine.step()
        number += 1
        assert number < 10_000, "the engine makes no progress"
    return handles


def assert_plain(handles: list[RequestHandle], arrivals: list[Arrival], architecture: str = "llama") -> None:
    """Every request says what plain decoding says; a cancelled one its beginning."""
    for handle, arrival in zip(handles, arrivals, strict=True):
        result = handle.result()
        expected = list(plain_answer(architecture, arrival.index)[: arrival.new_tokens])
        if result.finish_reason == "cancelled":
            assert result.token_ids == expected[: len(result.token_ids)]
            assert arrival.cancel_at_round is not None
        else:
            assert result.token_ids == expected
            assert result.finish_reason == "length"
        assert handle.token_ids == result.token_ids == list(handle)


def assert_nothing_left(engine: AdaFlashEngine) -> None:
    """No request, no slot and no memory is held."""
    stats = engine.statistics()
    assert (stats.active_requests, stats.queued_requests, stats.memory_bytes) == (0, 0, 0)
    assert not engine.has_requests
    assert sum(stats.finished_requests.values()) == stats.submitted_requests


def idle_request(prompt: list[int], **fields: Any) -> GenerationRequest:
    """A greedy request that nobody serves."""
    rules = StopRules(StoppingCriteriaList())
    rules.max_length = len(prompt) + 8
    values = {"do_sample": False, "samples_drafts": False, "seed": None, "settings": (), **fields}
    processors = values.pop("logits_processor", LogitsProcessorList())
    prepared = PreparedRequest(prompt, processors, rules, pad_token_id=0, **values)
    handle = RequestHandle(0, prompt, lambda *args: None, lambda: None, lambda: None)
    return GenerationRequest(handle, prepared, None)
