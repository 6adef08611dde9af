"""Exports on a real SGLang: DFLASH as it comes, and ADAFLASH of this package's plugin, in both of its modes.

Opt-in, because SGLang is 11 GB and needs an environment of its own: `make test-sglang`. It runs on CPUs with the help
of a harness, in bfloat16, so greedy tokens may differ where the target's own logits are a near-tie and nowhere else.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_drafter, tiny_target
from tiny_trajectories import make_trajectories, random_prompts
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, PreTrainedModel

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import ServerError
from adaflash_hf.evaluation.lossless import LosslessTally
from adaflash_hf.serving.draft_payload import DraftWeights, draft_weights, payloads
from adaflash_hf.serving.formats import convert_drafter
from adaflash_hf.serving.replica import Replica, ReplicaAddress
from adaflash_hf.training.drafter_trainer import DrafterTrainer
from adaflash_hf.training.training_arguments import DrafterTrainingArguments
from adaflash_hf.training.trajectory_dataset import TrajectoryDataset


ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ADAFLASH_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
# Imports alone take most of a minute on an idle machine.
START_TIMEOUT_S = float(os.environ.get("ADAFLASH_SGLANG_START_TIMEOUT_S", "900"))
NUM_PROMPTS = 12
MAX_NEW_TOKENS = 24
BLOCK_SIZE = 6
DRAFT_VOCAB_SIZE = 90

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="needs SGLang in an environment of its own: run `make test-sglang`, or set ADAFLASH_SGLANG_PYTHON to a "
    "python with sglang==0.5.23, this package, and on a machine without a GPU the harness that the Makefile installs",
)

COMMON = [
    *("--skip-tokenizer-init", "--skip-server-warmup", "--device", "cpu", "--dtype", "bfloat16"),
    *("--max-total-tokens", "20000", "--max-running-requests", "64"),
]
ADAFLASH = {"ADAFLASH_ACTIVATION_CONCURRENCY": "2", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Server:
    """A server that was started, and may have refused to."""

    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request, as JSON if it is."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data, headers), timeout=300) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def generate(self, prompts: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        """Greedy answers to all prompts at once."""
        sampling = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True}
        return self.call("/generate", {"input_ids": [list(prompt) for prompt in prompts], "sampling_params": sampling})

    def is_healthy(self) -> bool:
        try:
            self.call("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True


class Workload:
    """A tiny target, two drafters of one shape for it, one of which has learnt something, and prompts."""

    def __init__(self, folder: Path) -> None:
        # Weights that bfloat16 holds exactly, so that what is trained on is what is served.
        model = tiny_target("qwen3").to(torch.bfloat16).float()
        self.target = folder / "target"
        model.to(torch.bfloat16).save_pretrained(self.target)
        self.prompts = random_prompts(NUM_PROMPTS)[0]
        drafter = self.untrained(model)
        drafter.save_pretrained(folder / "untrained")
        self.train(drafter, model.float(), folder)
        drafter.save_pretrained(folder / "trained")
        self.exports: dict[str, Path] = {}
        for name in ("untrained", "trained"):
            for format_name in ("sglang", "sglang-plugin"):
                self.exports[f"{name}-{format_name}"] = out = folder / f"{name}-{format_name}"
                convert_drafter(folder / name, out, format_name)
        self.judge: PreTrainedModel = AutoModelForCausalLM.from_pretrained(self.target, dtype=torch.bfloat16).eval()

    @staticmethod
    def untrained(model: PreTrainedModel) -> DFlashDrafterModel:
        head = {"head_type": "mean_linear", "bottleneck_size": 8}
        drafter = tiny_drafter(model, block_size=BLOCK_SIZE, length_head_config=head)
        drafter.set_draft_vocabulary(torch.arange(96 - DRAFT_VOCAB_SIZE, 96))
        assert drafter.length_head is not None
        with torch.no_grad():
            # Estimates that differ from block to block, without which verify lengths would show nothing.
            drafter.length_head.down.weight.mul_(8)
            drafter.length_head.out.weight.mul_(80)
        return drafter

    def train(self, drafter: DFlashDrafterModel, model: PreTrainedModel, folder: Path) -> None:
        """Learns the answers to the prompts by heart, which takes seconds."""
        make_trajectories(folder / "trajectories", model, NUM_PROMPTS, max_new_tokens=MAX_NEW_TOKENS)
        dataset = TrajectoryDataset(folder / "trajectories")
        arguments = DrafterTrainingArguments(
            output_dir=str(folder / "run"),
            use_cpu=True,
            disable_tqdm=True,
            train_only="drafter",
            anchors_per_trajectory=12,
            per_device_train_batch_size=4,
            num_train_epochs=40,
            learning_rate=5e-3,
            save_strategy="no",
            report_to="none",
        )
        DrafterTrainer(drafter, model, arguments, Subset(dataset, range(NUM_PROMPTS))).train()
        drafter.eval()

    def tally(self, expected: Sequence[dict[str, Any]], actual: Sequence[dict[str, Any]]) -> LosslessTally:
        """Compares answers, with the target's logits where they differ."""
        tally = LosslessTally()
        with torch.no_grad():
            for prompt, one, other in zip(self.prompts, expected, actual, strict=True):
                assert len(one["output_ids"]) == len(other["output_ids"]) == MAX_NEW_TOKENS
                tally.add(self.judge, prompt, one["output_ids"], other["output_ids"])
        return tally


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def mean(answers: Sequence[dict[str, Any]], field: str) -> float:
    return sum(answer["meta_info"][field] for answer in answers) / len(answers)


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    return Workload(tmp_path_factory.mktemp("workload"))


@pytest.fixture(scope="module")
def servers(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One process that imports SGLang once and forks all servers."""
    folder = tmp_path_factory.mktemp("servers")
    speculation = ["--disable-overlap-schedule", "--speculative-algorithm"]
    plain, plugin = workload.exports["untrained-sglang"], workload.exports["untrained-sglang-plugin"]
    compact = {**ADAFLASH, "SGLANG_RAGGED_VERIFY_MODE": "compact"}
    plans: dict[str, tuple[list[str], dict[str, str]]] = {
        "base": ([], {}),
        "dflash": ([*speculation, "DFLASH", "--speculative-draft-model-path", str(plain)], {}),
        "cap": (
            [*speculation, "ADAFLASH", "--speculative-draft-model-path", str(plugin), "--enable-metrics"]
            + ["--decode-log-interval", "1"],
            {**ADAFLASH, "SGLANG_RAGGED_VERIFY_MODE": "cap-accept"},
        ),
        "compact": (
            [*speculation, "ADAFLASH", "--speculative-draft-model-path", str(plugin)],
            {**compact, "TEST_RAGGED_CPU_ATTENTION": "1"},
        ),
        "refused": ([*speculation, "ADAFLASH", "--speculative-draft-model-path", str(plugin)], compact),
    }
    started, entries = {}, []
    for (name, (arguments, environment)), port in zip(plans.items(), free_ports(len(plans)), strict=True):
        started[name] = Server(port, folder / f"{name}.log")
        arguments = ["--model-path", str(workload.target), "--port", str(port), *COMMON, *arguments]
        entries.append({"log": str(started[name].log), "arguments": arguments, "environment": environment})
    (folder / "servers.json").write_text(json.dumps(entries))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHONPATH"))}
    with open(folder / "all.log", "w") as log:
        process = subprocess.Popen(
            [PYTHON, ROOT / "tests_serving" / "sglang_servers.py", folder / "servers.json", folder / "checks.json"],
            env={**inherited, "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for([server for name, server in started.items() if name != "refused"], process, folder / "all.log")
        yield started
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def wait_for(expected: Sequence[Server], process: subprocess.Popen[bytes], log: Path) -> None:
    """Raises with the logs' ends if a server does not come up."""
    deadline = time.monotonic() + START_TIMEOUT_S
    waiting = list(expected)
    while waiting:
        waiting = [server for server in waiting if not server.is_healthy()]
        if waiting and (process.poll() is not None or time.monotonic() > deadline):
            texts = [log.read_text()[-2000:], *(one.log_text()[-4000:] for one in waiting if one.log.exists())]
            raise RuntimeError("\n\n".join(texts))
        time.sleep(1)


@pytest.fixture(scope="module")
def base(workload: Workload, servers: dict[str, Server]) -> list[dict[str, Any]]:
    return servers["base"].generate(workload.prompts)


def assert_lossless(workload: Workload, base: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    tally = workload.tally(base, answers)
    print(f"\n{tally}")  # noqa: T201 the numbers are what the run is for
    assert tally.different == 0, tally.differences


def test_the_base_server_is_the_target(workload: Workload, base: list[dict[str, Any]]) -> None:
    ids = [torch.tensor([prompt]) for prompt in workload.prompts]
    plain = [
        workload.judge.generate(
            one, attention_mask=torch.ones_like(one), max_new_tokens=MAX_NEW_TOKENS, do_sample=False
        )
        for one in ids
    ]
    answers = [{"output_ids": out[0, one.shape[1] :].tolist()} for one, out in zip(ids, plain, strict=True)]
    assert_lossless(workload, answers, base)


def test_sglang_is_as_the_plugin_needs_it(servers: dict[str, Server]) -> None:
    """Every hook is there, and packed rows are those of SGLang's DSPARK."""
    checks = json.loads((servers["base"].log.parent / "checks.json").read_text())
    assert checks == {"missing_hooks": [], "packing_differences": []}


def test_dflash_serves_the_export(workload: Workload, servers: dict[str, Server], base: list[dict[str, Any]]) -> None:
    """It drafts among all tokens, as SGLang has no draft vocabularies: other drafts, the same output."""
    answers = servers["dflash"].generate(workload.prompts)
    assert_lossless(workload, base, answers)
    assert mean(answers, "spec_verify_ct") > 0


@pytest.mark.parametrize("mode", ["cap", "compact"])
def test_adaflash_serves_and_reports_verify_lengths(
    mode: str, workload: Workload, servers: dict[str, Server], base: list[dict[str, Any]]
) -> None:
    server = servers[mode]
    answers = server.generate(workload.prompts)
    assert_lossless(workload, base, answers)
    lengths: list[int] = [0] * (BLOCK_SIZE + 1)
    for answer in answers:
        info = answer["meta_info"]
        histogram = info["spec_cap_lens_histogram"]
        assert sum(histogram) == info["spec_verify_ct"], "a verify length for each round"
        rows = sum(length * count for length, count in enumerate(histogram))
        assert info["spec_cap_length"] == pytest.approx(rows / info["spec_verify_ct"])
        # No round can commit more than it verified.
        assert MAX_NEW_TOKENS - 1 <= rows
        lengths = [a + b for a, b in zip(lengths, histogram + [0] * (len(lengths) - len(histogram)), strict=True)]
    assert lengths[0] == lengths[1] == 0, "two rows at least"
    assert sum(count > 0 for count in lengths) > 1, lengths
    expected_mode = {"cap": "cap-accept", "compact": "compact"}[mode]
    assert f"AdaFlash length head: on, mode {expected_mode}, length_scale 1.3, 2 to {BLOCK_SIZE} rows" in (
        server.log_text()
    )


def test_one_request_alone_is_verified_in_whole_blocks(workload: Workload, servers: dict[str, Server]) -> None:
    """Below the activation threshold, two here."""
    for mode in ("cap", "compact"):
        (answer,) = servers[mode].generate(workload.prompts[:1])
        assert answer["meta_info"]["spec_cap_length"] == BLOCK_SIZE


def test_both_modes_decide_alike(workload: Workload, servers: dict[str, Server]) -> None:
    """Packed rows see what whole blocks see. Rounding may part them, so most answers must agree, not all."""
    capped, packed = (servers[mode].generate(workload.prompts) for mode in ("cap", "compact"))
    pairs = [(a, b) for a, b in zip(capped, packed, strict=True) if a["output_ids"] == b["output_ids"]]
    assert len(pairs) > len(capped) // 2
    field = "spec_cap_lens_histogram"
    assert sum(a["meta_info"][field] == b["meta_info"][field] for a, b in pairs) > len(pairs) // 2


def test_metrics_have_the_verify_length(workload: Workload, servers: dict[str, Server]) -> None:
    servers["cap"].generate(workload.prompts)
    lines = [
        line for line in servers["cap"].call("/metrics").splitlines() if line.startswith("sglang:spec_cap_length")
    ]
    assert lines, "the gauge is there"
    # It is set every 40 decoding steps, so it may still be 0; it is never more than a block.
    assert 0 <= float(lines[0].rsplit(" ", 1)[1]) <= BLOCK_SIZE


def test_a_backend_without_ragged_verification_is_refused(servers: dict[str, Server]) -> None:
    log = servers["refused"].log_text()
    assert "SGLANG_RAGGED_VERIFY_MODE is 'compact': the attention backend TorchNativeAttnBackend does not know" in log
    assert "Pass --attention-backend fa3 on Hopper" in log
    assert not servers["refused"].is_healthy()


def send(replica: Replica, weights: DraftWeights, label: str) -> None:
    with replica.paused(), replica.draft_update():
        for payload in payloads(weights, 1 << 20):
            replica.update_draft(payload, 1, label)
    replica.flush_cache()


@pytest.mark.parametrize("mode", ["cap", "compact"])
def test_a_draft_only_reload_changes_acceptance_and_no_tensor_of_the_target(
    mode: str, workload: Workload, servers: dict[str, Server], base: list[dict[str, Any]]
) -> None:
    server = servers[mode]
    replica = Replica(ReplicaAddress(server.url))
    before = server.generate(workload.prompts)
    target, draft = replica.checksums("target"), replica.checksums("draft")
    assert target
    try:
        send(replica, draft_weights(workload.exports["trained-sglang-plugin"], has_plugin=True), "trained")
        assert replica.checksums("target") == target
        changed = {name for name, value in replica.checksums("draft").items() if draft[name] != value}
        assert len(changed) > len(draft) // 2
        after = server.generate(workload.prompts)
        assert_lossless(workload, base, after)
        tau_before, tau_after = mean(before, "spec_accept_length"), mean(after, "spec_accept_length")
        print(f"\ntau: {tau_before:.3f} before, {tau_after:.3f} after")  # noqa: T201
        assert tau_after > 1.25 * tau_before
        assert after[0]["meta_info"]["weight_version"] == "trained"
        assert "AdaFlash plugin: copies of updated weights were renewed." in server.log_text()
    finally:
        send(replica, draft_weights(workload.exports["untrained-sglang-plugin"], has_plugin=True), "default")
    assert replica.checksums("draft") == draft
    assert replica.checksums("target") == target


def test_weights_that_do_not_belong_are_refused_and_change_nothing(
    workload: Workload, servers: dict[str, Server]
) -> None:
    """Where SGLang's own model skips unknown names, and its process ends over wrong shapes."""
    replica = Replica(ReplicaAddress(servers["cap"].url))
    draft = replica.checksums("draft")
    good = draft_weights(workload.exports["trained-sglang-plugin"], has_plugin=True)
    for name, tensor, message in (
        ("layers.0.self_attention.q_proj.weight", torch.ones(2, 2), "is no tensor of this drafter"),
        ("norm.weight", torch.ones(7), r"has shape \(7,\); this drafter's is \(32,\)"),
    ):
        # The bad one comes last: nothing of what came before it may have been used.
        bad = DraftWeights("bad", {**{key: good.tensors[key] for key in good.tensors if key != name}, name: tensor})
        with pytest.raises(ServerError, match=message):
            send(replica, bad, "bad")
        assert replica.checksums("draft") == draft
    assert servers["cap"].generate(workload.prompts[:1])
