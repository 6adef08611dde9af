"""Memory of the training loss, and training throughput beside the losses of SpecForge and speculators.

    python examples/benchmark_training.py memory --out loss_memory
    python examples/benchmark_training.py throughput --others others --out training_throughput

`memory` runs loss and backward of every objective on 512 anchors x 16 rows of a 151,936-word vocabulary, each in a
process of its own, and reports what that process took above the LM head. `throughput` trains the same random drafter
on the same random trajectory with different losses: forward and backward through the drafter and AdamW are the same
code for all, only the loss between them is each project's own. Theirs come from a directory that you fill with

    python -m pip install --target others --no-deps speculators==0.9.0 hs-connectors==0.9.0 specforge==0.2.0
    python -m pip install --target others openai loguru pydantic-settings

so that your environment stays as it is. Without it only our own losses are measured. Both commands write
`<out>.json` and `<out>.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console
from torch import nn

from adaflash_hf import DFlashDrafterConfig, DFlashDrafterModel
from adaflash_hf.embedded_target import default_dtype
from adaflash_hf.evaluation.bench import describe_environment
from adaflash_hf.evaluation.peak_memory import PeakMemory
from adaflash_hf.evaluation.result_files import markdown_table, write_results
from adaflash_hf.training.anchors import block_positions, drafter_masks, label_positions, sample_anchors
from adaflash_hf.training.chunked_loss import draft_loss, rows_per_chunk
from adaflash_hf.training.objectives import DraftObjective, position_weights
from adaflash_hf.training.teachers import DenseTeacher, Teacher, TopKTeacher


TEACHER_TOP_K = 16
ROWS_AT_ONCE = 64
POSITION_DECAY = 7.0
GIGABYTE = 1e9
CROSS_ENTROPY = DraftObjective(1.0, labels="trajectory")
MIXTURE = DraftObjective(0.8, "reverse_kl", "entry", 0.01)
# Objective and where the target's distribution comes from.
OWN_LOSSES: dict[str, tuple[DraftObjective, str]] = {
    "cross-entropy": (CROSS_ENTROPY, "none"),
    "expected acceptance": (DraftObjective(0.0, "acceptance", "none", labels="trajectory"), "none"),
    "forward KL, full teacher": (DraftObjective(0.0, "forward_kl", "none"), "full"),
    "reverse KL, full teacher": (DraftObjective(0.0, "reverse_kl", "none"), "full"),
    "mixture, entries clipped, full teacher": (MIXTURE, "full"),
    "mixture, sum clipped, full teacher": (DraftObjective(0.8, "reverse_kl", "sum", 0.01), "full"),
    "mixture, entries clipped, top-16 teacher": (MIXTURE, "top_k"),
}
SPECULATORS_LOSSES = {"cross-entropy": "ce", "forward KL, full teacher": "kl_div", "reverse KL, full teacher": "rkl"}
SPECFORGE_CHUNKS = {"cross-entropy, chunks of 128 blocks (its default)": 128, "cross-entropy, all at once": 0}


class MemoryAboveStart:
    """Peak memory in bytes above that when made: of the GPU on CUDA, else of this process."""

    def __init__(self, device: torch.device) -> None:
        self._peak = PeakMemory(device)
        is_cuda = device.type == "cuda"
        self._start = torch.cuda.memory_allocated(device) if is_cuda else psutil.Process().memory_info().rss

    def read_bytes(self) -> int:
        return max(self._peak.read_bytes() - self._start, 0)


def make_head(sizes: dict[str, Any], device: torch.device) -> nn.Linear:
    head = nn.Linear(sizes["hidden_size"], sizes["vocab_size"], bias=False, device=device, dtype=_dtype(sizes))
    nn.init.normal_(head.weight, std=sizes["hidden_size"] ** -0.5)
    return head.requires_grad_(False)


def _dtype(sizes: dict[str, Any]) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, sizes["dtype"])
    return dtype


@torch.no_grad()
def make_teacher(kind: str, states: torch.Tensor, head: nn.Linear) -> Teacher | None:
    """The target's distribution, from its hidden states or as trajectories store it."""
    if kind == "none":
        return None
    if kind == "full":
        return DenseTeacher(states, head)
    parts = [head(part).float().log_softmax(-1).topk(TEACHER_TOP_K) for part in states.split(ROWS_AT_ONCE)]
    return TopKTeacher(torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts]))


def own_loss(
    rows: torch.Tensor,
    labels: torch.Tensor,
    teacher: Teacher | None,
    head: nn.Linear,
    objective: DraftObjective,
    sizes: dict[str, Any],
) -> torch.Tensor:
    """Loss of drafter rows `[blocks, slots, H]` as this package computes it."""
    blocks, slots = labels.shape
    chunk_rows = rows_per_chunk(sizes["vocab_size"], sizes["logits_memory_bytes"])
    weights = position_weights(slots, None if objective.couples_slots else POSITION_DECAY, rows.device)
    return draft_loss(
        rows.flatten(0, 1),
        labels.flatten(),
        weights.repeat(blocks),
        lambda chunk: head(chunk.to(head.weight.dtype)),
        objective,
        teacher,
        torch.arange(slots, device=rows.device).repeat(blocks),
        chunk_rows=chunk_rows,
    ).loss


def measure_memory(sizes: dict[str, Any], name: str) -> dict[str, Any]:
    """Loss and backward of one objective; inputs, gradient and a stored teacher count, the LM head does not."""
    torch.manual_seed(0)
    device = torch.device(sizes["device"])
    head = make_head(sizes, device)
    memory = MemoryAboveStart(device)
    shape = (sizes["anchors"], sizes["block_size"])
    rows = torch.randn(*shape, sizes["hidden_size"], device=device).requires_grad_()
    states = torch.randn(*shape, sizes["hidden_size"], device=device, dtype=head.weight.dtype)
    labels = torch.randint(sizes["vocab_size"], shape, device=device)
    objective, kind = OWN_LOSSES[name]
    teacher = make_teacher(kind, states.flatten(0, 1), head)
    began = time.perf_counter()
    loss = own_loss(rows, labels, teacher, head, objective, sizes)
    loss.backward()
    result = float(loss.detach())
    return {"loss": result, "seconds": time.perf_counter() - began, "peak_bytes": memory.read_bytes()}


class Problem:
    """A random drafter, one random trajectory, and the blocks to train on."""

    def __init__(self, sizes: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.sizes, self.device = sizes, torch.device(sizes["device"])
        hidden, tokens, layers = sizes["hidden_size"], sizes["tokens"], sizes["layers"]
        self.head = make_head(sizes, self.device)
        self.config = DFlashDrafterConfig(
            vocab_size=sizes["vocab_size"],
            hidden_size=hidden,
            intermediate_size=3 * hidden,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=hidden // 64,
            head_dim=64,
            block_size=sizes["block_size"],
            mask_token_id=0,
            num_target_layers=4 * layers + 3,
        )
        self.drafter = DFlashDrafterModel(self.config).to(self.device).train()
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4)
        self.anchors = sample_anchors(1, tokens - sizes["block_size"], sizes["anchors"], (0,))[None].to(self.device)
        width = self.config.context_feature_size
        self.context = torch.randn(1, tokens - 1, width, device=self.device)
        self.noise = torch.randn(1, self.anchors.shape[1] * sizes["block_size"], hidden, device=self.device)
        # States whose likeliest token is the token that follows, as on greedy trajectories.
        sequence = torch.randn(tokens, hidden, device=self.device, dtype=self.head.weight.dtype)
        with torch.no_grad():
            likeliest = torch.cat([self.head(part).argmax(-1) for part in sequence.split(ROWS_AT_ONCE)])
        places = label_positions(self.anchors[0], self.config.draft_length)
        self.states, self.labels = sequence[places - 1], likeliest[places - 1]  # [blocks, slots, H], [blocks, slots]

    def draft(self) -> torch.Tensor:
        """Hidden states of all block rows, `[blocks, block, H]`."""
        positions = torch.arange(self.context.shape[1], device=self.device)[None]
        output = self.drafter(
            noise_embeds=self.noise,
            context_hidden_states=self.context,
            attention_mask=drafter_masks(self.config, self.anchors, self.context.shape[1], self.noise.dtype),
            position_ids=torch.cat([positions, block_positions(self.anchors, self.config.block_size)], dim=1),
        )
        return output.last_hidden_state.view(self.anchors.shape[1], self.config.block_size, -1)


Loss = Callable[[Problem, torch.Tensor], torch.Tensor]


def own(name: str) -> Loss:
    objective, kind = OWN_LOSSES[name]
    stored: list[Teacher | None] = []

    def loss(problem: Problem, hidden: torch.Tensor) -> torch.Tensor:
        # Likeliest tokens come with the trajectories; the full teacher computes its logits in each step.
        stored.append(stored[0] if stored else make_teacher(kind, problem.states.flatten(0, 1), problem.head))
        rows = hidden[:, -problem.config.draft_length :]
        return own_loss(rows, problem.labels, stored[0], problem.head, objective, problem.sizes)

    return loss


def of_speculators(name: str) -> Loss:
    """Its eager loss with its metrics, on the logits of all rows, its target logits computed by the LM head."""
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.metrics import compute_metrics

    config = resolve_loss_config(SPECULATORS_LOSSES[name], implementation="eager")

    def loss(problem: Problem, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(hidden.shape[:2], device=hidden.device)
        mask[:, 0] = 0
        # The row of the anchor has no target; any state will do.
        states = torch.cat([problem.states[:, :1], problem.states], dim=1)
        with torch.no_grad():
            targets = problem.head(states.flatten(0, 1))[None]
        logits = problem.head(hidden.flatten(0, 1).to(problem.head.weight.dtype))[None]
        value, _ = compute_metrics(
            logits, targets, mask.view(1, -1), hidden.shape[1], gamma=POSITION_DECAY, loss_config=config
        )
        # It divides by the number of slots where we and SpecForge divide by their weights.
        return (
            value * problem.config.draft_length / position_weights(problem.config.draft_length, POSITION_DECAY).sum()
        )

    return loss


def of_specforge(name: str) -> Loss:
    """Its chunked DFlash loss, on the logits of all rows; it has no soft targets."""
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.core.chunking import checkpointed_chunk_reduce

    def loss(problem: Problem, hidden: torch.Tensor) -> torch.Tensor:
        model = OnlineDFlashModel(
            nn.Identity(), problem.head, nn.Identity(), 0, hidden.shape[1], "sdpa", loss_decay_gamma=POSITION_DECAY
        )
        mask = torch.ones(hidden.shape[:2], device=hidden.device)
        mask[:, 0] = 0
        labels = torch.cat([problem.labels[:, :1], problem.labels], dim=1)
        total, weight, *_ = checkpointed_chunk_reduce(
            model._dflash_objective_chunk_terms,
            hidden.to(problem.head.weight.dtype)[None],
            labels[None],
            mask[None],
            chunk_size=SPECFORGE_CHUNKS[name],
            dim=1,
        )
        return total / weight

    return loss


PROJECTS: dict[str, tuple[Callable[[str], Loss], Sequence[str]]] = {
    "adaflash_hf": (own, tuple(OWN_LOSSES)),
    "speculators": (of_speculators, tuple(SPECULATORS_LOSSES)),
    "specforge": (of_specforge, tuple(SPECFORGE_CHUNKS)),
}


def measure_throughput(sizes: dict[str, Any], project: str, name: str) -> dict[str, Any]:
    """Whole training steps; the first is not timed."""
    sys.path.append(sizes["others"])  # behind everything that is installed
    loss_of = PROJECTS[project][0](name)
    problem = Problem(sizes)
    memory = MemoryAboveStart(problem.device)
    losses, times = [], []
    for _ in range(sizes["steps"] + 1):
        began = time.perf_counter()
        with torch.autocast(problem.device.type, torch.bfloat16, enabled=_dtype(sizes) is torch.bfloat16):
            hidden = problem.draft()
        loss = loss_of(problem, hidden)
        loss.backward()
        problem.optimizer.step()
        problem.optimizer.zero_grad()
        losses.append(float(loss.detach()))
        times.append(time.perf_counter() - began)
    step_s = statistics.median(times[1:])
    return {
        "loss": losses[0],
        "step_s": step_s,
        "tokens_per_s": sizes["tokens"] / step_s,
        "blocks_per_s": problem.anchors.shape[1] / step_s,
        "peak_bytes": memory.read_bytes(),
    }


def in_a_process(task: dict[str, Any]) -> dict[str, Any]:
    """A process of its own, so that its high-water mark is that of one loss alone."""
    process = subprocess.run(
        [sys.executable, __file__, "worker", json.dumps(task)], capture_output=True, text=True, check=False
    )
    if process.returncode:
        last = (process.stderr.strip().splitlines() or [f"killed by signal {-process.returncode}"])[-1]
        return {"failed": last}
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def worker(task: dict[str, Any]) -> None:
    torch.set_num_threads(task["sizes"]["threads"])
    if task["command"] == "memory":
        result = measure_memory(task["sizes"], task["name"])
    else:
        result = measure_throughput(task["sizes"], task["project"], task["name"])
    sys.stdout.write(json.dumps(result) + "\n")


def run_memory(sizes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    results = {}
    for name in _chosen(OWN_LOSSES, sizes):
        results[name] = in_a_process({"command": "memory", "sizes": sizes, "name": name})
        _show(f"{name}: {results[name]}")
    lines = [
        [name, _gigabytes(row), row.get("seconds"), row.get("loss"), row.get("failed")]
        for name, row in results.items()
    ]
    text = (
        f"{sizes['anchors']} anchors x {sizes['block_size']} rows, vocabulary {sizes['vocab_size']:,}, hidden size "
        f"{sizes['hidden_size']}, LM head in {sizes['dtype']}, {sizes['device']}. Peak of loss and backward above the "
        "LM head: hidden states, their gradient, labels and a stored teacher are counted."
    )
    return results, [text, markdown_table(["objective", "peak GB", "seconds", "loss (nats)", "failed"], lines)]


def run_throughput(sizes: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    results: dict[str, Any] = {}
    for project, (_, names) in PROJECTS.items():
        if project != "adaflash_hf" and not (Path(sizes["others"]) / project).is_dir():
            _show(f"{project} is not in {sizes['others']!r}; --help says how to install it there.")
            continue
        for name in _chosen(names, sizes):
            task = {"command": "throughput", "sizes": sizes, "project": project, "name": name}
            results[f"{project}: {name}"] = in_a_process(task)
            _show(f"{project}: {name}: {results[f'{project}: {name}']}")
    lines = [
        [name, row.get("tokens_per_s"), row.get("step_s"), _gigabytes(row), row.get("loss"), row.get("failed")]
        for name, row in results.items()
    ]
    text = (
        f"One trajectory of {sizes['tokens']} tokens, {sizes['anchors']} blocks of {sizes['block_size']} rows, "
        f"vocabulary {sizes['vocab_size']:,}, hidden size {sizes['hidden_size']}, {sizes['layers']} layers, LM head "
        f"in {sizes['dtype']}, {sizes['device']}, {sizes['threads']} threads; median of {sizes['steps']} steps. "
        "Drafter forward, backward and AdamW are the same code in all rows, only the loss differs. Peak memory is "
        "above the weights, with gradients and optimizer state. Losses of the first step are scaled to one "
        "normalization, so that equal objectives show equal values. speculators and SpecForge also project the anchor "
        "rows, and speculators takes its hard labels from the target's logits, which it computes in each step."
    )
    header = ["loss", "trajectory tokens/s", "step s", "peak GB", "loss (nats)", "failed"]
    return results, [text, markdown_table(header, lines)]


def _chosen(names: Iterable[str], sizes: dict[str, Any]) -> list[str]:
    return [name for name in names if sizes["only"] in name]


def _show(text: str) -> None:
    Console().print(text, highlight=False, markup=False, soft_wrap=True)


def _gigabytes(row: dict[str, Any]) -> float | None:
    return row["peak_bytes"] / GIGABYTE if "peak_bytes" in row else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, anchors in (("memory", 512), ("throughput", 32)):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="results, without a suffix")
        command.add_argument("--only", default="", help="measure losses whose name has this in it")
        command.add_argument("--vocab-size", type=int, default=151_936)
        command.add_argument("--hidden-size", type=int, default=1024)
        command.add_argument("--block-size", type=int, default=16)
        command.add_argument("--anchors", type=int, default=anchors)
        command.add_argument("--logits-memory-bytes", type=int, default=256 * 2**20)
        command.add_argument("--dtype", default="auto", choices=["auto", "bfloat16", "float32"])
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--threads", type=int, default=torch.get_num_threads())
        if name == "throughput":
            command.add_argument("--layers", type=int, default=2)
            command.add_argument("--tokens", type=int, default=512, help="length of the trajectory")
            command.add_argument("--steps", type=int, default=3)
            command.add_argument("--others", default="others", help="directory with speculators and specforge")
    commands.add_parser("worker").add_argument("task", type=json.loads)
    args = vars(parser.parse_args())
    if args["command"] == "worker":
        worker(args["task"])
        return
    out = args.pop("out")
    if args["dtype"] == "auto":
        # Emulated bfloat16 is slower than float32, on processors without instructions for it.
        args["dtype"] = str(default_dtype(args["device"])).removeprefix("torch.")
    results, sections = (run_memory if args["command"] == "memory" else run_throughput)(args)
    data = {"sizes": args, "environment": describe_environment(), "results": results}
    write_results(out, data, f"Training benchmark: {args['command']}", sections)
    _show("\n\n".join(sections))


if __name__ == "__main__":
    main()
