"""Online adaptation under load: reloads while requests run, and processes killed at random instants.

    python examples/soak_online.py --reloads 100 --seconds 60 --kills 100
    python examples/soak_online.py --target smollm2-135m --drafter checkpoints/adaflash-drafter-smollm2-135m \
        --prompts prompts.jsonl --dtype float32 --reloads 100 --kills 100

Reloads: an engine answers prompts, many at once, while versions with other weights are published one after the other.
No request may fail, and each answer must be that of plain decoding. Kills: `adaflash online run`'s two processes are
sent SIGKILL in turn, at random instants, until the prompts are through. No version that can be loaded may be half
written, every prompt must be in the buffer, and no trajectory may be trained on twice. Without `--target` the models
are tiny and random, and nothing is downloaded. Exits with 1 if anything was not as it should be.
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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from adaflash_hf import AdaFlashEngine, DFlashDrafterConfig, DFlashDrafterModel, RequestResult
from adaflash_hf.embedded_target import load_target
from adaflash_hf.online import BufferSettings, HotReloader, Publisher, ReplayBuffer, VersionManifest
from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.run_settings import InferenceSettings, SideSettings, TrainerSettings
from adaflash_hf.online.supervisor import Supervisor
from adaflash_hf.training.prompts import Prompt, encode_prompts, read_prompt_file


NUM_PROMPTS = 64


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


@dataclass
class SoakReport:
    """
    What happened.

    Attributes:
        answers (`int`): Requests that ended.
        pauses_s (`list[float]`): How long each reload held decoding up.
        round_s (`float`): Mean time of a round of the engine.
        kills (`dict[str, int]`): Processes killed, by side.
        rounds (`int`): Rounds of training done in spite of it.
        seconds (`float`): Of the whole part.
        wrong (`list[str]`): What was not as it should be.
    """

    answers: int = 0
    pauses_s: list[float] = field(default_factory=list)
    round_s: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    rounds: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


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


def soak_reloads(models: SoakModels, place: Path, reloads: int, seconds: float, concurrency: int = 16) -> SoakReport:
    """
    Reload under load.

    Args:
        models (`SoakModels`): What is soaked.
        place (`Path`): An empty directory.
        reloads (`int`): How often.
        seconds (`float`): Spread over this time.
        concurrency (`int`, *optional*, defaults to 16): Requests in flight.
    """
    report, began_s = SoakReport(), time.monotonic()
    target, tokenizer = load_target(models.target, models.dtype)
    drafter = DFlashDrafterModel.from_pretrained(models.drafter, dtype=target.dtype).to(target.device).eval()
    prompts = encode_prompts(tokenizer, models.prompts)
    expected = [_plain(target, prompt, models.max_new_tokens) for prompt in prompts]
    publisher, is_over = Publisher(place / "published", keep_versions=3), threading.Event()
    publisher.publish(drafter, VersionManifest(0))
    engine = AdaFlashEngine(target, drafter, max_concurrency=concurrency)
    reloader = HotReloader(drafter, target, publisher.directory, poll_s=0.02)
    reloader.attach_engine(engine)
    slots = threading.Semaphore(concurrency)
    numbers: dict[int, int] = {}
    known = threading.Lock()

    def finished(result: RequestResult) -> None:
        with known:
            number = numbers.pop(result.request_id)
        report.answers += 1
        if result.token_ids != expected[number]:
            report.wrong.append(
                f"prompt {number}: {result.finish_reason}, {result.error or 'other tokens than plain'}"
            )
        slots.release()

    def keep_serving() -> None:
        request = 0
        while not is_over.is_set():
            if not slots.acquire(timeout=0.5):
                continue
            number = request % len(prompts)
            with known:
                handle = engine.submit(prompts[number], max_new_tokens=models.max_new_tokens, do_sample=False)
                numbers[handle.request_id] = number
            request += 1

    engine.on_finished(finished)
    serving = threading.Thread(target=keep_serving)
    with reloader, engine:
        serving.start()
        try:
            for version in range(1, reloads + 1):
                _publish_other_weights(publisher, models.drafter, version, target.dtype)
                if not _wait_for(lambda version=version: reloader.version == version, 120):  # type: ignore[misc]
                    report.wrong.append(f"version {version} was not taken: {reloader.status}")
                    break
                report.pauses_s.append(reloader.status.pause_s)
                time.sleep(max(began_s + seconds * version / reloads - time.monotonic(), 0))
        finally:
            is_over.set()
            serving.join()
    statistics = engine.statistics()
    report.round_s = statistics.busy_s / max(statistics.steps, 1)
    report.wrong += [f"version {version} was refused: {why}" for version, why in reloader.status.refused.items()]
    report.seconds = time.monotonic() - began_s
    return report


def _plain(target: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    ids = torch.tensor([prompt], device=target.device)
    output = target.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


def _publish_other_weights(publisher: Publisher, drafter: str, version: int, dtype: torch.dtype) -> None:
    """The drafter's weights a little changed, with a verdict that lets them pass without traffic to try them on."""
    model = DFlashDrafterModel.from_pretrained(drafter, dtype=dtype)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(1e-3 * noise.to(parameter.dtype))
    verdict = {"acceptance_before": {"all": 1.0}, "acceptance_after": {"all": 1.0}}
    publisher.publish(model, VersionManifest(version, parent=version - 1, **verdict))


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
    report, began_s, rng = SoakReport(), time.monotonic(), random.Random(seed)
    side = SideSettings(
        models.target,
        models.drafter,
        place / "buffer",
        place / "published",
        dtype=models.dtype,
        buffer_settings=BufferSettings(held_out_share=0.25),
    )
    arguments = OnlineTrainingArguments(
        round_size=8, epochs=1, min_held_out=1, tolerance=10.0, anchors_per_trajectory=8, held_out=4
    )
    supervisor = Supervisor(
        TrainerSettings(side, arguments, poll_s=0.1),
        InferenceSettings(
            side, models.prompts, concurrency=4, max_new_tokens=models.max_new_tokens, run_id="soak", prepack=False
        ),
        poll_s=0.05,
        endures_quick_deaths=True,
    )
    due_s, is_ending = [time.monotonic() + rng.uniform(0, longest_s)], list[bool]()

    def look(snapshot: Mapping[str, Any]) -> None:
        report.wrong += _half_written(place / "published")
        done = sum(report.kills.values())
        if done >= kills:
            if snapshot["server"].get("position", 0) < len(models.prompts):
                return
            # All are answered; once the server is gone, the trainer has the machine to itself.
            entry = snapshot["processes"]["server"]
            if entry["is_alive"] and not is_ending:
                is_ending.append(True)
                os.kill(entry["pid"], signal.SIGTERM)
            if snapshot["trainer"].get("rounds_done", 0) > 0:
                supervisor.stopping.set()
            return
        name = ("trainer", "server")[done % 2]
        entry = snapshot["processes"].get(name, {})
        if entry.get("is_alive") and time.monotonic() >= due_s[0]:
            os.kill(entry["pid"], signal.SIGKILL)
            report.kills[name] = report.kills.get(name, 0) + 1
            due_s[0] = time.monotonic() + rng.uniform(0, longest_s)

    supervisor.run(look)
    report.wrong += _what_is_wrong(place, models.prompts)
    report.rounds = supervisor.snapshot["trainer"].get("rounds_done", 0)
    report.answers = supervisor.snapshot["buffer"]["appended"]
    report.seconds = time.monotonic() - began_s
    return report


def _half_written(directory: Path) -> list[str]:
    try:
        latest = Publisher(directory, keep_versions=5).latest()
        if latest is not None:
            latest.check_files()
    except Exception as error:  # whatever it is, a server would have met it
        return [f"what is to be served is not whole: {error}"]
    return []


def _what_is_wrong(place: Path, prompts: tuple[Prompt, ...]) -> list[str]:
    wrong = _half_written(place / "published")
    publisher, buffer = Publisher(place / "published"), ReplayBuffer(place / "buffer")
    for number in publisher.numbers():
        publisher.get(number).check_files()
        DFlashDrafterModel.from_pretrained(publisher.path_of(number))
    with buffer.database.reading() as db:
        most = db.execute("SELECT max(times_trained) FROM trajectories").fetchone()[0]
    if most > 1:
        wrong.append(f"a trajectory was trained on {most} times")
    answered = len({one.prompt_hash for one in buffer.newest(1_000_000)})
    if answered < len(set(prompts)):
        wrong.append(f"{answered} of {len(set(prompts))} prompts are in the buffer")
    return wrong


def _wait_for(is_true: Any, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


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
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--longest", type=float, default=20.0, help="Most seconds between two kills.")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if (options.target is None) != (options.drafter is None) or (options.target is None) != (options.prompts is None):
        parser.error("give --target, --drafter and --prompts, or none of them")
    console, place = Console(), Path(tempfile.mkdtemp(prefix="adaflash-soak-"))
    try:
        if options.target is None:
            soaked = save_tiny_models(place)
            soaked.max_new_tokens = options.max_new_tokens
        else:
            prompts = tuple(read_prompt_file(options.prompts)[:NUM_PROMPTS])
            soaked = SoakModels(options.target, options.drafter, prompts, options.dtype, options.max_new_tokens)
        reloaded = soak_reloads(soaked, place / "reloads", options.reloads, options.seconds, options.concurrency)
        if reloaded.pauses_s:
            console.print(
                f"{len(reloaded.pauses_s)} reloads in {reloaded.seconds:.1f} s at concurrency {options.concurrency}, "
                f"{reloaded.answers} answers; pause {median(reloaded.pauses_s) * 1e3:.2f} ms (longest "
                f"{max(reloaded.pauses_s) * 1e3:.2f} ms), a round takes {reloaded.round_s * 1e3:.2f} ms."
            )
        (place / "kills").mkdir()
        killed = soak_kills(soaked, place / "kills", options.kills, options.seed, options.longest)
        console.print(
            f"{sum(killed.kills.values())} processes killed ({killed.kills}) in {killed.seconds:.1f} s, "
            f"{killed.answers} answers, {killed.rounds} rounds of training."
        )
        wrong = [*reloaded.wrong, *killed.wrong]
        for message in wrong[:20]:
            console.print(f"wrong: {message}", markup=False)
        console.print("All as it should be." if not wrong else f"{len(wrong)} things were wrong.")
        return 1 if wrong else 0
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
