"""Multi-token prediction by heads that a target really has: a Mellum whose tokens and drafts are known by hand."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_drafter
from transformers import MellumConfig, MellumForCausalLM
from transformers.modeling_layers import MtpModel

from adaflash_hf.cli import main
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.evaluation.bench_method_builder import build_method
from adaflash_hf.evaluation.bench_methods import BenchModels
from adaflash_hf.evaluation.mtp import check_mtp_heads


pytestmark = pytest.mark.skipif(
    not hasattr(MellumConfig, "mtp_layer_types"), reason="this transformers knows no heads of Mellum's"
)

VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
# After the first token 12 more: the head errs after every third id, so rounds commit 2, 1, 2, 1 ... tokens.
NEW_TOKENS = 13
TAU = 1.5


def followed_by_the_next_id() -> torch.Tensor:
    """Row of the token that follows, column of a token: each id is followed by the next, none by a special token."""
    following = [max(4, (token + 1) % VOCAB_SIZE) for token in range(VOCAB_SIZE)]
    return torch.eye(VOCAB_SIZE)[:, following]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Directories of a target with one head, of the same without it, and of a drafter."""
    directory = tmp_path_factory.mktemp("mtp")
    torch.manual_seed(0)
    config = MellumConfig(
        vocab_size=VOCAB_SIZE, hidden_size=VOCAB_SIZE, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        layer_types=["full_attention", "sliding_attention"], sliding_window=16, max_position_embeddings=512,
        num_mtp_layers=1, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    target = MellumForCausalLM(config)
    heads = MtpModel(target, 1)
    # Column of a token: what its follower is drafted from, itself or, at every third id, the wrong one.
    draft_from = torch.eye(VOCAB_SIZE)[:, [(id + (id % 3 == 0)) % VOCAB_SIZE for id in range(VOCAB_SIZE)]]
    with torch.no_grad():
        for name, weight in [*target.named_parameters(), *heads.named_parameters()]:
            if "experts" in name or "o_proj" in name:
                weight.zero_()  # what is left of a layer is its residual
        target.get_input_embeddings().weight.copy_(torch.eye(VOCAB_SIZE))
        target.lm_head.weight.copy_(followed_by_the_next_id())
        heads.layers[0].eh_proj.weight.copy_(torch.cat([draft_from, torch.zeros_like(draft_from)], dim=1))
    for name in ("target", "headless"):
        target.save_pretrained(directory / name)
        byte_tokenizer().save_pretrained(directory / name)
    file = directory / "target" / "model.safetensors"
    own = {f"mtp.{name}": weight for name, weight in heads.state_dict().items() if name.startswith("layers.")}
    save_file({**load_file(file), **own}, file, metadata={"format": "pt"})
    tiny_drafter(target, target_layer_ids=[0, 1]).save_pretrained(directory / "drafter")
    return directory


@pytest.fixture
def loads(monkeypatch):
    """Grows by one whenever transformers reads heads."""
    seen = []
    original = MtpModel.from_pretrained
    monkeypatch.setattr(MtpModel, "from_pretrained", lambda *a, **k: seen.append(1) or original(*a, **k))
    return seen


def run(saved, target, out, *command):
    options = ("--target", saved / target, "--drafter", saved / "drafter", "--dtype", "float32", "--device", "cpu")
    size = ("--workload", "vicuna", "--requests", 2, "--repeats", 2, "--max-new-tokens", NEW_TOKENS, "--no-plots")
    return main([str(argument) for argument in (*command, *options, *size, "--out", out)])


@pytest.mark.parametrize(("command", "results"), [(("bench",), ""), (("evaluate", "methods"), "methods/results")])
def test_heads_beside_a_drafter(saved, tmp_path, capsys, monkeypatch, loads, command, results):
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "out"
    given = ("--method", "plain,dflash,transformers,transformers_mtp", "--concurrency", "1,2")
    assert run(saved, "target", out, *command, *given) == 0
    shown = capsys.readouterr()
    assert len(loads) == 1  # and not once for each prompt, inside of what is timed
    found = json.loads((out / results).with_suffix(".json").read_text())
    rows = {(row["method"], row["concurrency"]): row for row in found["results"]}
    assert all(row["identical"] and row["generated_tokens"] == 2 * NEW_TOKENS for row in rows.values())
    row = rows["transformers_mtp", 1]
    assert row["acceptance_length"] == TAU and row["acceptance_by_position"] == [0.5]
    assert row["mean_verify_length"] == 2 and row["draft_time_share"] is None and row["speedup"] > 0
    [line] = [line.split() for line in shown.out.splitlines() if "transformers_mtp" in line]
    assert f"{TAU:.2f}" in line and line[-1] == "yes"
    assert ("transformers_mtp", 2) not in rows and found["skipped"][0]["concurrency"] == 2
    assert "Not measured: transformers_mtp on vicuna at concurrency 2: transformers decodes one" in shown.err


def test_heads_are_given_back(saved, loads):
    """Another `generate(use_mtp=True)` reads its own."""
    target = MellumForCausalLM.from_pretrained(saved / "target", dtype=torch.float32)
    run = build_method("transformers_mtp", BenchModels(target)).run([[5, 9], [7, 8, 9]], 1, NEW_TOKENS)
    assert run.token_ids == [list(range(10, 10 + NEW_TOKENS))] * 2 and len(loads) == 1
    assert run.stats is not None and run.stats.target_forwards == 2 + run.stats.rounds
    ids = target.generate(torch.tensor([[5, 9]]), use_mtp=True, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert ids[0, 2:].tolist() == run.token_ids[0] and len(loads) == 2


def test_a_checkpoint_without_the_heads_that_its_configuration_names(saved, tmp_path, capsys):
    check_mtp_heads(str(saved / "headless"))
    assert run(saved, "headless", tmp_path / "out", "bench", "--method", "transformers_mtp", "--concurrency", 1) == 0
    [told] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Not measured: ")]
    assert "transformers_mtp on vicuna at concurrency 1: `--target` is" in told and "weights are missing" in told
    assert "eh_proj" not in told and told.endswith("Pass a --target with such heads, or leave transformers_mtp out.")


def test_targets_without_heads_are_refused_by_name(saved, tmp_path):
    for name in ("smollm2-135m", str(saved / "drafter")):
        with pytest.raises(InvalidInputError, match="no `num_mtp_layers`.* leave transformers_mtp out"):
            check_mtp_heads(name)
    with pytest.raises(InvalidInputError, match="configuration cannot be read"):
        check_mtp_heads(str(tmp_path))
