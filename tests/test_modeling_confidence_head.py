"""Confidence heads: values worked out by hand, what a label means, saving alone."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from adaflash_hf import ConfidenceHeadConfig, ConfidenceHeadModel, DrafterCheckpointError, InvalidInputError
from adaflash_hf.modeling_confidence_head import UNREACHED_LABEL


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def head_by_hand() -> ConfidenceHeadModel:
    head = ConfidenceHeadModel(ConfidenceHeadConfig(hidden_size=2, draft_length=2)).eval()
    head.load_state_dict({"proj.weight": torch.tensor([[1.0, -2.0]]), "proj.bias": torch.tensor([0.5])})
    return head


# The anchor's row, which drafts nothing, and two rows with logits 1.5 and -1.5.
BLOCK = torch.tensor([[[9.0, 9.0], [1.0, 0.0], [0.0, 1.0]]])


def random_head(draft_length: int = 3) -> ConfidenceHeadModel:
    torch.manual_seed(0)
    config = ConfidenceHeadConfig(hidden_size=6, draft_length=draft_length, initializer_range=0.5)
    return ConfidenceHeadModel(config).eval()


def test_probabilities_by_hand() -> None:
    output = head_by_hand()(BLOCK)
    first, second = sigmoid(1.5), sigmoid(-1.5)
    assert output.probabilities[0].tolist() == pytest.approx([first, second])
    assert output.prefix_probabilities[0].tolist() == pytest.approx([first, first * second])
    assert output.loss is None


def test_a_layout_without_an_idle_anchor_uses_every_row() -> None:
    # Anchor first: as many drafts as rows.
    assert head_by_hand()(BLOCK[:, 1:]).logits[0].tolist() == pytest.approx([1.5, -1.5])


def test_loss_is_the_cross_entropy_of_the_slots_that_were_reached() -> None:
    head = head_by_hand()
    # First block: both accepted. Second: the first was not, so nobody knows about the second.
    labels = torch.tensor([[1, 1], [0, UNREACHED_LABEL]])
    expected = -(math.log(sigmoid(1.5)) + math.log(sigmoid(-1.5)) + math.log(1 - sigmoid(1.5))) / 3
    assert head(BLOCK.expand(2, -1, -1), labels=labels).loss.item() == pytest.approx(expected)
    soft = head(BLOCK, labels=torch.tensor([[0.25, -1.0]])).loss.item()
    assert soft == pytest.approx(-0.25 * math.log(sigmoid(1.5)) - 0.75 * math.log(1 - sigmoid(1.5)))
    nothing = head(BLOCK, labels=torch.full((1, 2), UNREACHED_LABEL)).loss
    assert nothing.item() == 0


def test_probabilities_are_float32_in_bfloat16_models() -> None:
    output = random_head().to(torch.bfloat16)(torch.randn(2, 4, 6).bfloat16())
    assert output.probabilities.shape == (2, 3) and output.probabilities.dtype == torch.float32


def test_saved_and_loaded_alone(tmp_path: Path) -> None:
    head, block = random_head(), torch.randn(2, 4, 6)
    head.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "adaflash_confidence_head"
    assert {name: list(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()} == {
        "proj.weight": [1, 6],
        "proj.bias": [1],
    }
    for loaded in (ConfidenceHeadModel.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is ConfidenceHeadModel
        torch.testing.assert_close(loaded(block).logits, head(block).logits, rtol=0, atol=0)


REMOTE_CODE = """
import sys
sys.modules["adaflash_hf"] = None  # as where the package is not installed
import torch
from transformers import AutoModel
head = AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)
print(float(head(torch.ones(1, 4, 6)).probabilities.sum()))
"""


def test_loads_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head()
    head.save_pretrained(tmp_path / "head")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    result = subprocess.run(
        [sys.executable, "-c", REMOTE_CODE, str(tmp_path / "head")], capture_output=True, text=True, check=True
    )
    assert float(result.stdout) == pytest.approx(head(torch.ones(1, 4, 6)).probabilities.sum().item(), rel=1e-5)


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"shape \(2, 4, 7\); expected \[batch_size, block_size, 6\]"):
        random_head()(torch.randn(2, 4, 7))
    with pytest.raises(InvalidInputError, match=r"at least 3 rows"):
        random_head()(torch.randn(2, 2, 6))


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    head = random_head()
    with torch.no_grad():
        head.proj.weight[0, 0] = float("nan")
    head.save_pretrained(tmp_path)
    with pytest.raises(DrafterCheckpointError, match="proj.weight"):
        ConfidenceHeadModel.from_pretrained(tmp_path)
