"""Online adaptation under load: reloads while requests run, and processes killed at random instants.

    python examples/soak_online.py --reloads 100 --seconds 60 --kills 100
    python examples/soak_online.py --target smollm2-135m --drafter checkpoints/adaflash-drafter-smollm2-135m \
        --prompts prompts.jsonl --dtype float32 --reloads 100 --seconds 60 --kills 100 --max-new-tokens 96 \
        --length-policy cost_aware

Reloads: an engine answers prompts, many at once, while versions with other weights are published one after the other.
No request may fail, each answer must be that of plain decoding, and no reload may hold decoding up for as long as a
round takes. Kills: `adaflash online run`'s two processes, of which the trainer is the one that publishes, are sent
SIGKILL in turn, at random instants; then both must go on by themselves. No version that can be loaded may be half
written, no answer that was given may be missing in the buffer or be another than plain decoding's, and no trajectory
may be part of the weights twice. Without `--target` the models are tiny and random, and nothing is downloaded. Exits
with 1 if anything was not as it should be.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from adaflash_hf import AdaFlashEngine, DFlashDrafterConfig, DFlashDrafterModel, RequestResult
from adaflash_hf.embedded_target import load_target, without_progress_bars
from adaflash_hf.online import BufferSettings, HotReloader, Publisher, ReplayBuffer, VersionManifest
from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.online_trainer import STATE_DIRECTORY
from adaflash_hf.online.recorded_trajectory import MIN_RESPONSE_TOKENS, RecordedTrajectory
from adaflash_hf.online.run_settings import InferenceSettings, SideSettings, TrainerSettings
from adaflash_hf.online.side_process import log_path
from adaflash_hf.online.supervisor import Supervisor
from adaflash_hf.online.training_state import TrainingProgress, TrainingStateStore
from adaflash_hf.training.prompts import Prompt, encode_prompts, read_prompt_file


NUM_PROMPTS = 64
ROUND_SIZE = 8
# How long both sides may take to go on after the last kill.
LONGEST_RESUMPTION_S = 900.0
# What the logs say where a killed process left something that cannot be used.
COMPLAINTS = {
    "server": ("cannot be served", "is not taken"),
    "trainer": ("begins with the latest published version", "is given up", "trained on again"),
}


@dataclass
class SoakModels:
    """
    What is soaked.

    Attributes:
        target (`str`): Directory or Hub id of the target.
        drafter (`str`): The same of the drafter.
        prompts (`tuple[Prompt, ...]`): What to answer.
        dtype (`str`): What the target computes in; only in float32 must answers be identical.
        max_new_tokens (`int`): Longest answer.
    """

    target: str
    drafter: str
    prompts: tuple[Prompt, ...]
    dtype: str = "float32"
    max_new_tokens: int = 24

    @cached_property
    def references(self) -> list[tuple[list[int], list[int]]]:
        """Tokens of each prompt, and of what plain greedy decoding answers."""
        target, tokenizer = load_target(self.target, self.dtype)
        prompts = encode_prompts(tokenizer, self.prompts)
        return [(prompt, _plain(target, prompt, self.max_new_tokens)) for prompt in prompts]


@dataclass
class SoakReport:
    """
    What happened.

    Attributes:
        answers (`int`): Requests that ended.
        pauses_s (`list[float]`): How long each reload held decoding up.
        rounds_s (`list[float]`): How long each round of the engine took, those without a reload.
        reload_rounds_s (`list[float]`): The same of those with one.
        kills (`dict[str, int]`): Processes killed, by side.
        killed_at (`Counter[str]`): The same, by side and what it was doing.
        rounds (`int`): Rounds of training done in spite of it.
        seconds (`float`): Of the whole part.
        wrong (`list[str]`): What was not as it should be.
    """

    answers: int = 0
    pauses_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    reload_rounds_s: list[float] = field(default_factory=list)
    kills: dict[str, int] = field(default_factory=dict)
    killed_at: Counter[str] = field(default_factory=Counter)
    rounds: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def slow_reloads(self) -> list[str]:
        """What is to be said of reloads that held decoding up for as long as a round takes."""
        round_s = mean(self.rounds_s)
        slow = sum(pause_s >= round_s for pause_s in self.pauses_s)
        if not slow:
            return []
        longest = f"{max(self.pauses_s) * 1e3:.2f} ms"
        return [
            f"{slow} of {len(self.pauses_s)} reloads took a round ({round_s * 1e3:.2f} ms) or more, up to {longest}"
        ]


class RoundTimes:
    """
    How long the rounds of an engine under load take, from one beginning to the next. Made before a reloader is
    attached, so that what that does between two rounds is part of the second one.

    Args:
        engine (`AdaFlashEngine`): The engine.
        version (`Callable[[], int]`): The version in use now.
        report (`SoakReport`): Where to.
    """

    def __init__(self, engine: AdaFlashEngine, version: Callable[[], int], report: SoakReport):
        self._engine, self._version, self._report = engine, version, report
        self._last: tuple[float, int] | None = None
        engine.between_rounds(self._begin)

    def _begin(self) -> None:
        now, version = time.perf_counter(), self._version()
        if not self._engine.has_requests:
            self._last = None  # called while it waits for some, which is no round
            return
        if self._last is not None:
            began_s, before = self._last
            times = self._report.rounds_s if version == before else self._report.reload_rounds_s
            times.append(now - began_s)
        self._last = now, version


def save_tiny_models(directory: Path) -> SoakModels:
    """
    A random target with a tokenizer of bytes, a random drafter for it, and prompts.

    Args:
        directory (`Path`): Where to.
    """
    torch.manual_seed(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<mask>", *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "initializer_range": 0.5,  # clear preferences, so that no two logits are nearly equal
        "max_position_embeddings": 512,
    }
    config = LlamaConfig(num_hidden_layers=2, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    LlamaForCausalLM(config).save_pretrained(directory / "target")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(directory / "target")
    drafter_config = DFlashDrafterConfig(
        num_hidden_layers=1,
        block_size=4,
        mask_token_id=3,
        num_target_layers=2,
        target_layer_ids=[0, 1],
        length_head_config={"head_type": "mean_linear"},
        **sizes,
    )
    DFlashDrafterModel(drafter_config).save_pretrained(directory / "drafter")
    prompts = tuple(Prompt((("user", f"{i} times {i + 3}?"),), ("maths", "code")[i % 2]) for i in range(NUM_PROMPTS))
    return SoakModels(str(directory / "target"), str(directory / "drafter"), prompts)


def soak_reloads(
    models: SoakModels,
    place: Path,
    reloads: int,
    seconds: float,
    concurrency: int = 16,
    length_policy: str | None = None,
) -> SoakReport:
    """
    Reload under load.

    Args:
        models (`SoakModels`): What is soaked.
        place (`Path`): An empty directory.
        reloads (`int`): How often.
        seconds (`float`): Spread over this time.
        concurrency (`int`, *optional*, defaults to 16): Requests in flight.
        length_policy (`str`, *optional*): The engine's.
    """
    report, references = SoakReport(), models.references
    target = load_target(models.target, models.dtype).model
    drafter = DFlashDrafterModel.from_pretrained(models.drafter, dtype=target.dtype).to(target.device).eval()
    publisher, is_over = Publisher(place / "published", keep_versions=3), threading.Event()
    publisher.publish(drafter, VersionManifest(0))
    engine = AdaFlashEngine(target, drafter, length_policy=length_policy, max_concurrency=concurrency)
    reloader = HotReloader(drafter, target, publisher.directory, poll_s=0.02)
    RoundTimes(engine, lambda: reloader.version, report)
    reloader.attach_engine(engine)
    make_version = OtherWeights(publisher, models.drafter)
    slots = threading.Semaphore(concurrency)
    numbers: dict[int, int] = {}
    known = threading.Lock()

    def finished(result: RequestResult) -> None:
        with known:
            number = numbers.pop(result.request_id)
        report.answers += 1
        if result.token_ids != references[number][1]:
            report.wrong.append(
                f"prompt {number}: {result.finish_reason}, {result.error or 'other tokens than plain'}"
            )
        slots.release()

    def keep_serving() -> None:
        request = 0
        while not is_over.is_set():
            if not slots.acquire(timeout=0.5):
                continue
            number = request % len(references)
            with known:
                handle = engine.submit(references[number][0], max_new_tokens=models.max_new_tokens, do_sample=False)
                numbers[handle.request_id] = number
            request += 1

    engine.on_finished(finished)
    serving = threading.Thread(target=keep_serving)
    with reloader, engine:
        serving.start()
        try:
            # Its first prompts all at once are no load that lasts.
            if not _wait_for(lambda: report.answers >= concurrency, LONGEST_RESUMPTION_S):
                report.wrong.append(f"{report.answers} of the first {concurrency} requests ended")
            began_s = time.monotonic()
            for version in range(1, reloads + 1):
                make_version.publish(version)
                if not _wait_for(lambda version=version: reloader.version == version, 120):  # type: ignore[misc]
                    report.wrong.append(f"version {version} was not taken: {reloader.status}")
                    break
                report.pauses_s.append(reloader.status.pause_s)
                report.seconds = time.monotonic() - began_s
                time.sleep(max(began_s + seconds * version / reloads - time.monotonic(), 0))
        finally:
            is_over.set()
            serving.join()
    report.wrong += [f"version {version} was refused: {why}" for version, why in reloader.status.refused.items()]
    if not make_version.is_served_by(drafter):
        report.wrong.append("the weights in use are not those of the version that is said to be in use")
    return report


def _plain(target: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=target.device)
    output = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


class OtherWeights:
    """
    Versions with a drafter's weights, each a little changed in another way.

    Args:
        publisher (`Publisher`): Where to.
        drafter (`str`): Directory or Hub id of the drafter.
    """

    def __init__(self, publisher: Publisher, drafter: str):
        self._publisher = publisher
        self._model = DFlashDrafterModel.from_pretrained(drafter, dtype=torch.float32)
        self._dtype = DFlashDrafterModel.from_pretrained(drafter).dtype
        self._original = [parameter.detach().clone() for parameter in self._model.parameters()]
        generator = torch.Generator().manual_seed(0)
        self._noise = [torch.randn(weight.shape, generator=generator) for weight in self._original]

    @torch.no_grad()
    def publish(self, version: int) -> None:
        """
        Publish a version, with a verdict that lets it pass without traffic to try it on.

        Args:
            version (`int`): Its number.
        """
        size = (-1) ** version * (1e-3 + 1e-5 * version)
        for parameter, weight, noise in zip(self._model.parameters(), self._original, self._noise, strict=True):
            parameter.copy_(torch.add(weight, noise, alpha=size))
        verdict = {"acceptance_before": {"all": 1.0}, "acceptance_after": {"all": 1.0}}
        manifest = VersionManifest(version, parent=version - 1, **verdict)
        self._publisher.publish(self._model, manifest, dtype=self._dtype)

    def is_served_by(self, drafter: DFlashDrafterModel) -> bool:
        """Whether a drafter has the weights that were published last."""
        published = DFlashDrafterModel.from_pretrained(self._publisher.latest().path, dtype=drafter.dtype)
        there = drafter.state_dict()
        return all(weight.equal(there[name].cpu()) for name, weight in published.state_dict().items())


def soak_kills(models: SoakModels, place: Path, kills: int, seed: int = 0, longest_s: float = 20.0) -> SoakReport:
    """
    Kill server and trainer in turn.

    Args:
        models (`SoakModels`): What is soaked.
        place (`Path`): An empty directory.
        kills (`int`): How often.
        seed (`int`, *optional*, defaults to 0): Decides when.
        longest_s (`float`, *optional*, defaults to 20.0): Longest time between two kills, the mean is half of it.
    """
    report, began_s = SoakReport(), time.monotonic()
    side = SideSettings(
        models.target,
        models.drafter,
        place / "buffer",
        place / "published",
        dtype=models.dtype,
        buffer_settings=BufferSettings(max_rows=1_000_000, held_out_share=0.25),
    )
    arguments = OnlineTrainingArguments(
        round_size=ROUND_SIZE, epochs=1, min_held_out=1, tolerance=10.0, anchors_per_trajectory=8, held_out=4
    )
    supervisor = Supervisor(
        TrainerSettings(side, arguments, poll_s=0.1),
        InferenceSettings(
            side, models.prompts, concurrency=4, max_new_tokens=models.max_new_tokens, run_id="soak", prepack=False
        ),
        poll_s=0.05,
        endures_quick_deaths=True,
    )
    supervisor.run(Killer(supervisor, report, place / "published", kills, random.Random(seed), longest_s).look)
    report.wrong += _what_is_wrong(models, place, supervisor.snapshot["server"].get("position", 0))
    report.rounds = supervisor.snapshot["trainer"].get("rounds_done", 0)
    report.answers = supervisor.snapshot["buffer"]["appended"]
    report.seconds = time.monotonic() - began_s
    return report


class Killer:
    """
    Kills both sides in turn, and ends the run when both have gone on after that.

    Args:
        supervisor (`Supervisor`): What runs them.
        report (`SoakReport`): Where to note it.
        directory (`Path`): Directory of published versions.
        kills (`int`): How often.
        rng (`random.Random`): Decides when.
        longest_s (`float`): Longest time between two kills.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        report: SoakReport,
        directory: Path,
        kills: int,
        rng: random.Random,
        longest_s: float,
    ):
        self._supervisor, self._report, self._publisher = supervisor, report, Publisher(directory)
        self._kills, self._rng, self._longest_s = kills, rng, longest_s
        self._due_s = time.monotonic() + rng.uniform(0, longest_s)
        self._checked: Any = None
        self._progress = (0, 0)  # position in the prompts and rounds of training at the last kill
        self._is_server_ending = False

    def look(self, snapshot: Mapping[str, Any]) -> None:
        """
        Called by the supervisor, again and again.

        Args:
            snapshot (`Mapping[str, Any]`): What it sees.
        """
        self._check_latest()
        done = sum(self._report.kills.values())
        if done >= self._kills:
            self._end_when_both_go_on(snapshot)
            return
        name = ("trainer", "server")[done % 2]
        entry = snapshot["processes"].get(name, {})
        if entry.get("is_alive") and time.monotonic() >= self._due_s:
            status = snapshot[name]
            phase = status.get("phase") if status.get("pid") == entry["pid"] else "starting"
            os.kill(entry["pid"], signal.SIGKILL)
            self._report.kills[name] = self._report.kills.get(name, 0) + 1
            self._report.killed_at[f"{name} {phase}"] += 1
            self._progress = _progress_of(snapshot)
            self._due_s = time.monotonic() + self._rng.uniform(0, self._longest_s)

    def _check_latest(self) -> None:
        """Whatever a server would load next must be whole; looked at when it is another one than before."""
        try:
            pointer = self._publisher.pointer()
            if pointer is not None and pointer != self._checked:
                self._publisher.get(pointer.version).check_files()
                self._checked = pointer
        except Exception as error:  # whatever it is, a server would have met it
            self._report.wrong.append(f"what is to be served is not whole: {error}")

    def _end_when_both_go_on(self, snapshot: Mapping[str, Any]) -> None:
        position, rounds = (now - before for now, before in zip(_progress_of(snapshot), self._progress, strict=True))
        if position > 0 and rounds > 0:
            self._supervisor.stopping.set()
        elif time.monotonic() > self._due_s + LONGEST_RESUMPTION_S:
            self._report.wrong.append(
                f"since the last kill {position} prompts were answered and {rounds} rounds were trained"
            )
            self._supervisor.stopping.set()
        elif position > 0 and snapshot["buffer"].get("waiting", 0) >= ROUND_SIZE and not self._is_server_ending:
            server = snapshot["processes"]["server"]
            if server["is_alive"]:  # the status may be a killed one's last, and no other is started yet
                # There is enough to train on; without the server the trainer has the machine to itself.
                self._is_server_ending = True
                os.kill(server["pid"], signal.SIGTERM)


def _progress_of(snapshot: Mapping[str, Any]) -> tuple[int, int]:
    return snapshot["server"].get("position", 0), snapshot["trainer"].get("rounds_done", 0)


def _what_is_wrong(models: SoakModels, place: Path, position: int) -> list[str]:
    publisher, buffer = Publisher(place / "published"), ReplayBuffer(place / "buffer")
    for number in publisher.numbers():
        publisher.get(number).check_files()
        DFlashDrafterModel.from_pretrained(publisher.path_of(number))
    progress = TrainingStateStore(publisher.directory / STATE_DIRECTORY).read_progress()
    wrong = [] if progress is None else _miscounted(buffer, progress)
    wrong += _lost_or_other(models, buffer, position)
    for side, complaints in COMPLAINTS.items():
        lines = log_path(publisher.directory, side).read_text(encoding="utf-8", errors="replace").splitlines()
        wrong += [f"{side}: {line}" for line in lines if any(complaint in line for complaint in complaints)]
    return wrong


def _miscounted(buffer: ReplayBuffer, progress: TrainingProgress) -> list[str]:
    """The trainer's own account of what is in its weights against the buffer's of what was trained on."""
    wrong = []
    rounds = Counter(entry["round"] for entry in progress.history)
    wrong += [f"round {number} was trained on {count} times" for number, count in rounds.items() if count > 1]
    learned = sum(sum(entry["trajectories"].values()) for entry in progress.history)
    with buffer.database.reading() as db:
        most, marked = db.execute("SELECT max(times_trained), total(times_trained) FROM trajectories").fetchone()
    opened = buffer.open_round()
    if opened is not None and opened.id <= progress.round_id:
        marked += len(opened.trajectory_ids)  # saved, and not marked yet when the trainer was ended
    if most > 1:
        wrong.append(f"a trajectory was trained on {most} times")
    if learned != marked:
        wrong.append(f"{learned} trajectories were trained on, {marked:.0f} are marked so")
    return wrong


def _lost_or_other(models: SoakModels, buffer: ReplayBuffer, position: int) -> list[str]:
    """All prompts before `position` were answered, again and again from the first to the last."""
    rows: dict[float, list[list[int]]] = {}
    for row in buffer.newest(buffer.settings.max_rows):
        rows.setdefault(row.prompt_hash, []).append(row.token_ids[row.prompt_length :].tolist())
    answered: Counter[float] = Counter()
    wrong = []
    for number, (prompt, answer) in enumerate(models.references):
        if len(answer) < MIN_RESPONSE_TOKENS:  # nothing to learn from, hence not recorded
            continue
        key = RecordedTrajectory.from_lists(prompt, answer).prompt_hash
        found = rows.get(key, [])
        answered[key] += len(range(number, position, len(models.references)))
        # One that was cancelled when the server was ended is a part of it.
        other = sum(response != answer[: len(response)] for response in found)
        if other:
            wrong.append(f"prompt {number}: {other} of {len(found)} answers are not plain decoding's")
    lost = sum(max(count - len(rows.get(key, [])), 0) for key, count in answered.items())
    return [*wrong, f"{lost} of {position} answers are not in the buffer"] if lost else wrong


def _wait_for(is_true: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _told_of_reloads(report: SoakReport, seconds: float, concurrency: int) -> str:
    pause_s, round_s = median(report.pauses_s), median(report.rounds_s)
    shown = {
        "pause": pause_s,
        "longest pause": max(report.pauses_s),
        "round": round_s,
        "round on average": mean(report.rounds_s),
    }
    if report.reload_rounds_s:
        shown["round that begins with a reload"] = median(report.reload_rounds_s)
    return (
        f"{len(report.pauses_s)} reloads in {report.seconds:.1f} s ({seconds:g} s asked for) at concurrency "
        f"{concurrency}, {report.answers} answers; a pause is {pause_s / round_s:.1%} of a round. In ms: "
        + ", ".join(f"{name} {1e3 * value:.2f}" for name, value in shown.items())
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="Directory or Hub id; tiny random models if it is not given.")
    parser.add_argument("--drafter", help="Directory or Hub id of its drafter.")
    parser.add_argument("--prompts", help="File of prompts.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-new-tokens", type=int, default=24)
    parser.add_argument("--reloads", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=12.0, help="Over which the reloads are spread.")
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--length-policy", help="Of the engine that reloads.")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--longest", type=float, default=20.0, help="Most seconds between two kills.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if (options.target is None) != (options.drafter is None) or (options.target is None) != (options.prompts is None):
        parser.error("give --target, --drafter and --prompts, or none of them")
    console, place = Console(highlight=False, soft_wrap=True), Path(tempfile.mkdtemp(prefix="adaflash-soak-"))
    try:
        if options.target is None:
            soaked = save_tiny_models(place)
            soaked.max_new_tokens = options.max_new_tokens
        else:
            prompts = tuple(read_prompt_file(options.prompts)[:NUM_PROMPTS])
            soaked = SoakModels(options.target, options.drafter, prompts, options.dtype, options.max_new_tokens)
        wrong = []
        if options.reloads:
            (place / "reloads").mkdir()
            with without_progress_bars():
                reloaded = soak_reloads(
                    soaked,
                    place / "reloads",
                    options.reloads,
                    options.seconds,
                    options.concurrency,
                    options.length_policy,
                )
            wrong += reloaded.wrong
            if reloaded.pauses_s:
                console.print(_told_of_reloads(reloaded, options.seconds, options.concurrency))
                wrong += reloaded.slow_reloads()
        if options.kills:
            (place / "kills").mkdir()
            killed = soak_kills(soaked, place / "kills", options.kills, options.seed, options.longest)
            wrong += killed.wrong
            when = ", ".join(f"{count} {phase}" for phase, count in sorted(killed.killed_at.items()))
            console.print(
                f"{sum(killed.kills.values())} processes killed in {killed.seconds:.1f} s ({when}); {killed.answers} "
                f"answers, {killed.rounds} rounds of training."
            )
        for message in wrong[:20]:
            console.print(f"wrong: {message}", markup=False)
        console.print("All as it should be." if not wrong else f"{len(wrong)} things were wrong.")
        return 1 if wrong else 0
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
