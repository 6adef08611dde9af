"""Thousands of small requests through one engine: none lost, answered twice, starved or wrong, and memory stays flat.

    python examples/soak_engine.py --requests 2000

Several threads submit requests of random lengths, settings and stops, give some of them up, and break some on purpose;
the memory limit is so low that requests are returned to the queue and finished later. The models are tiny and random,
so no download is needed. Exits with 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adaflash_hf import AdaFlashEngine, DFlashDrafterConfig, DFlashDrafterModel, EngineQueueFullError, RequestResult


VOCAB_SIZE = 24
MAX_NEW_TOKENS = 120
NUM_PROMPTS = 16
MAX_PROMPT_TOKENS = 60
MAX_CONCURRENCY = 16
MAX_QUEUE = 8
# Memory for the largest request alone, which may move within it, and a little more: two large ones do not fit.
MEMORY_LIMIT = 2.2
# Rounds in which all requests that the engine takes would have been served one after the other, prefills included. The
# oldest gets on in every round, so whoever is there for longer was starved.
STARVED_ROUNDS = (MAX_CONCURRENCY + MAX_QUEUE) * (MAX_NEW_TOKENS + 30)
# With fewer requests than this it may happen that none is returned.
ENOUGH_TO_RETURN = 100
# Growth of memory over the second half that still counts as flat.
FLAT = 1.05


class Broken(Exception):
    """What a request that is broken on purpose must fail with."""


@dataclass
class SoakReport:
    """
    What happened.

    Attributes:
        submitted (`int`): Requests that the engine took.
        outcomes (`Counter`): How they ended.
        wrong (`list[str]`): What was not as it should be.
        most_overtaken (`int`): Most requests that came later than another one and ended before it.
        most_rounds (`int`): Most rounds between submission and end.
        returned (`int`): Returns to the queue for want of memory.
        finished_after_return (`int`): Requests that were returned and then said all that plain decoding says.
        acceptance_length (`float`): Tau.
        memory_bytes (`list[int]`): Resident or traced memory, over the course of the run.
        seconds (`float`): Of the whole run.
    """

    submitted: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    most_overtaken: int = 0
    most_rounds: int = 0
    returned: int = 0
    finished_after_return: int = 0
    acceptance_length: float = 0.0
    memory_bytes: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def memory_growth(self) -> float:
        """Most memory of the last quarter over most memory of the second."""
        quarter = max(len(self.memory_bytes) // 4, 1)
        return max(self.memory_bytes[-quarter:]) / max(self.memory_bytes[quarter : 2 * quarter])


def tiny_models() -> tuple[PreTrainedModel, DFlashDrafterModel]:
    """A random target with clear preferences and a random drafter for it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        initializer_range=0.3,
        max_position_embeddings=256,
        eos_token_id=None,
        **sizes,
    )
    target = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # no token is preferred by the length of its row
        target.lm_head.weight.div_(target.lm_head.weight.norm(dim=-1, keepdim=True))
    target.generation_config.eos_token_id = None
    target.generation_config.pad_token_id = 0
    drafter_config = DFlashDrafterConfig(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=1,
        head_dim=8,
        block_size=5,
        mask_token_id=1,
        num_target_layers=2,
        target_layer_ids=[0, 1],
        max_position_embeddings=256,
        **sizes,
    )
    return target, DFlashDrafterModel(drafter_config).eval()


class Owner(threading.Thread):
    """Submits requests one after the other, does with them what owners do, and checks every answer."""

    def __init__(
        self,
        engine: AdaFlashEngine,
        answers: dict[tuple[int, ...], list[int]],
        seed: int,
        count: int,
        rounds_so_far: Callable[[], int],
    ):
        super().__init__(daemon=True)
        self.engine, self.answers, self.count = engine, answers, count
        self.rounds_so_far = rounds_so_far
        self.chance = random.Random(seed)
        self.submitted: dict[int, int] = {}  # in which round
        self.finished_after_return = 0
        self.wrong: list[str] = []

    def run(self) -> None:
        for _ in range(self.count):
            try:
                self._one()
            except Exception as error:
                self.wrong.append(f"an owner failed: {type(error).__name__}: {error}")

    def _one(self) -> None:
        prompt, answer = self.chance.choice(list(self.answers.items()))
        count = 1 + int(MAX_NEW_TOKENS * self.chance.random() ** 2)  # most are short
        expected = answer[:count]
        kwargs: dict = {"max_new_tokens": count, "do_sample": False}
        kind = self.chance.choices(("greedy", "stop", "sampled", "broken"), (5, 3, 3, 1))[0]
        if kind == "stop":
            kwargs["eos_token_id"] = self.chance.sample(range(VOCAB_SIZE), 3)
            end = next((i for i, token in enumerate(expected) if token in kwargs["eos_token_id"]), count - 1)
            expected = expected[: end + 1]
        elif kind == "sampled":
            kwargs.update(do_sample=True, seed=self.chance.randrange(100), repetition_penalty=1.2)
        elif kind == "broken":
            kwargs["logits_processor"] = [self._breaks_after(self.chance.randrange(count))]
        while True:
            before = self.rounds_so_far()
            try:
                handle = self.engine.submit(prompt, **kwargs)
                break
            except EngineQueueFullError:
                time.sleep(0.005)
        self.submitted[handle.request_id] = before
        if self.chance.random() < 0.2:
            give_up_after = self.chance.randrange(count)
            try:
                for _ in zip(range(give_up_after), handle, strict=False):
                    pass
            except Broken:
                return
            handle.cancel()
        try:
            result = handle.result()
        except Broken:
            if kind != "broken":
                self.wrong.append(f"{handle} failed with the error of another")
            return
        if result.token_ids != handle.token_ids:
            self.wrong.append(f"{handle} streamed other tokens than it returned")
        if kind != "sampled":
            whole = expected if result.finish_reason != "cancelled" else expected[: len(result.token_ids)]
            if result.token_ids != whole:
                self.wrong.append(f"{handle} said {result.token_ids}, expected {whole}")
            elif result.stats.returns and result.finish_reason != "cancelled":
                self.finished_after_return += 1

    @staticmethod
    def _breaks_after(count: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        calls = iter(range(count))

        def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            if next(calls, None) is None:
                raise Broken
            return scores

        return processor


def memory_in_use(is_traced: bool) -> int:
    """Bytes that Python's allocator holds, or that the process has in memory."""
    gc.collect()
    if is_traced:
        return tracemalloc.get_traced_memory()[0]
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # the most so far: it must not grow either


def soak(
    num_requests: int,
    seed: int = 0,
    num_owners: int = 12,
    is_traced: bool = False,
    make_drafter: Callable[[PreTrainedModel, list[list[int]]], PreTrainedModel] | None = None,
) -> SoakReport:
    """Runs the traffic and checks it.

    Args:
        num_requests (`int`): Requests in all.
        seed (`int`): Decides what owners do.
        num_owners (`int`): Threads that submit.
        is_traced (`bool`): Measure Python's own memory, which is exact and slow, rather than the process's.
        make_drafter (`Callable`, *optional*): Makes another drafter from the target and all plain sequences.
    """
    target, drafter = tiny_models()
    chance = random.Random(seed)
    answers: dict[tuple[int, ...], list[int]] = {}
    for _ in range(NUM_PROMPTS):
        prompt = tuple(chance.randrange(2, VOCAB_SIZE) for _ in range(chance.randint(1, MAX_PROMPT_TOKENS)))
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers[prompt] = ids[0, len(prompt) :].tolist()
    if make_drafter is not None:
        drafter = make_drafter(target, [[*prompt, *answer] for prompt, answer in answers.items()])
    largest = MAX_PROMPT_TOKENS + MAX_NEW_TOKENS + drafter.config.block_size
    limit = int(MEMORY_LIMIT * AdaFlashEngine(target, drafter).memory_bytes_for(largest))
    engine = AdaFlashEngine(
        target,
        drafter,
        max_concurrency=MAX_CONCURRENCY,
        max_queue=MAX_QUEUE,
        prefill_chunk_tokens=32,
        memory_limit_bytes=limit,
    )
    report = SoakReport()
    ended: list[int] = []
    ended_in: dict[int, int] = {}
    every = max(num_requests // 40, 1)
    is_over: list[int] = []
    latest_round = 0

    def begin_round() -> None:
        nonlocal latest_round
        latest_round += 1

    def note(result: RequestResult) -> None:
        ended.append(result.request_id)
        ended_in[result.request_id] = latest_round
        report.outcomes[result.finish_reason] += 1
        if len(ended) % every == 0:
            report.memory_bytes.append(memory_in_use(is_traced))
            if engine.statistics().memory_bytes > limit:
                is_over.append(len(ended))

    engine.between_rounds(begin_round)
    engine.on_finished(note)
    if is_traced:
        tracemalloc.start()
    started_s = time.perf_counter()
    shares = [num_requests // num_owners + (owner < num_requests % num_owners) for owner in range(num_owners)]
    owners = [
        Owner(engine, answers, 1000 * seed + number, share, lambda: latest_round)
        for number, share in enumerate(shares)
    ]
    with engine:
        for owner in owners:
            owner.start()
        for owner in owners:
            owner.join()
    report.seconds = time.perf_counter() - started_s
    if is_traced:
        tracemalloc.stop()
    stats = engine.statistics()
    submitted = {number: at for owner in owners for number, at in owner.submitted.items()}
    report.submitted, report.returned = len(submitted), stats.returned_requests
    report.acceptance_length = stats.acceptance_length
    report.wrong = [text for owner in owners for text in owner.wrong]
    report.finished_after_return = sum(owner.finished_after_return for owner in owners)
    report.most_overtaken = max(sum(other > number for other in ended[:place]) for place, number in enumerate(ended))
    report.most_rounds = max(ended_in[number] - at for number, at in submitted.items() if number in ended_in)
    if report.most_rounds > STARVED_ROUNDS:
        report.wrong.append(f"starved: {report.most_rounds} rounds for one, and {STARVED_ROUNDS} are enough for all")
    if num_requests >= ENOUGH_TO_RETURN and not report.finished_after_return:
        report.wrong.append(f"{report.returned} returns, and no request that was returned finished as it should")
    if is_over:
        report.wrong.append(f"{limit} bytes were exceeded after {is_over} requests")
    if sorted(ended) != sorted(submitted):
        twice = [number for number, times in Counter(ended).items() if times > 1]
        report.wrong.append(f"lost: {sorted(set(submitted) - set(ended))}; ended twice: {twice}")
    if engine.has_requests or stats.memory_bytes:
        report.wrong.append(f"left behind: {stats}")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--owners", type=int, default=12, help="threads that submit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", action="store_true", help="measure Python's own memory instead of the process's")
    args = parser.parse_args()
    if args.requests < 8 or args.owners < 1:
        parser.error(f"--requests is {args.requests} and --owners {args.owners}: 8 and 1 at least, to compare memory")
    console = Console()
    with console.status(f"{args.requests} requests"):
        report = soak(args.requests, args.seed, args.owners, args.trace)
    console.print(
        f"{report.submitted} requests in {report.seconds:.0f} s: {dict(report.outcomes)}, tau "
        f"{report.acceptance_length:.2f}"
    )
    console.print(
        f"{report.returned} returns, {report.finished_after_return} requests finished after one; at most "
        f"{report.most_overtaken} overtook another, {report.most_rounds} rounds at most ({STARVED_ROUNDS} would be "
        "starvation)"
    )
    console.print(
        f"memory {min(report.memory_bytes) / 2**20:.1f} to {max(report.memory_bytes) / 2**20:.1f} MiB, growth "
        f"{report.memory_growth:.3f} from the second quarter to the last"
    )
    for text in report.wrong[:20]:
        console.print(f"[red]{text}[/]")
    return 1 if report.wrong or report.memory_growth > FLAT else 0


if __name__ == "__main__":
    sys.exit(main())
