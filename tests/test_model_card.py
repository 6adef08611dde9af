from __future__ import annotations

import json
from importlib import resources

import pytest
from hub_server import running_hub
from huggingface_hub import EvalResult, ModelCard
from tiny_models import tiny_drafter

from adaflash_hf import model_card
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.model_card import CardOptions, build_drafter_card, tau_by_domain, write_drafter_card
from adaflash_hf.training.initialization import attach_length_head


METRICS = {
    "eval_acceptance_length": 2.25,
    "eval_acceptance_length_code": 2.0,
    "eval_acceptance_length_math": 2.5,
    "eval_acceptance_length_spread": 0.5,
    "eval_acceptance_position_1": 0.75,
    "eval_acceptance_position_2": 0.5,
    "eval_length_head_error": 0.125,
}
SOURCE = {
    "temperature": 0.0,
    "max_new_tokens": 256,
    "dtype": "bfloat16",
    "provenance": {"datasets": ["org/questions"]},
}


def record(**changes):
    return {
        "argv": ["/home/someone/.venv/bin/adaflash", "train", "--out", "/home/someone/runs/new", "--lr", "1e-3"],
        "settings": {"target": "org/target-8b", "init": None, "only": None, "learning_rate": 1e-3, "anchors": 512},
        "reasons": {"learning_rate": "given", "anchors": "what the DFlash family uses"},
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
        "git_commit": "f00d",
        "data": {
            "train": {"math": {"trajectories": 90, "response_tokens": 9000}},
            "held_out_trajectories": 32,
            "sources": [SOURCE],
        },
        "machine": {"device": "NVIDIA H200", "processes": 2},
        "outcome": {
            "step": 200,
            "elapsed_s": 7200.0,
            "curve": [
                {"step": step, "elapsed_s": 36.0 * step, "eval_acceptance_length": 1 + step / 160}
                for step in range(10, 201, 10)
            ],
        },
        **changes,
    }


@pytest.fixture
def directory(tmp_path):
    drafter = tiny_drafter(target_model_name_or_path="org/target-8b")
    attach_length_head(drafter)
    path = tmp_path / "my-drafter"
    drafter.save_pretrained(path)
    (path / "metrics.json").write_text(json.dumps(METRICS))
    (path / "run.json").write_text(json.dumps(record()))
    return path


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def license_of(base_model, *, may_download):
        return "mit" if base_model == "org/target-8b" and may_download else None

    monkeypatch.setattr(model_card, "_license_of", license_of)


def test_a_card_says_what_was_measured_and_recorded(directory):
    path = write_drafter_card(directory, CardOptions(repo_id="org/drafter"))
    card = ModelCard.load(path)
    assert path == directory / "README.md"
    assert card.data.base_model == "org/target-8b" and card.data.license == "mit"
    assert card.data.library_name == "transformers" and card.data.datasets == ["org/questions"]
    assert "speculative-decoding" in card.data.tags
    measured = {result.dataset_name: result.metric_value for result in card.data.eval_results}
    assert measured == {
        "Held-out responses of the target": 2.25,
        "Held-out responses of the target, code": 2.0,
        "Held-out responses of the target, math": 2.5,
    }
    assert {result.dataset_args["trajectories"] for result in card.data.eval_results} == {32}
    text = card.content
    for expected in (
        "with a length head for [org/target-8b](https://huggingface.co/org/target-8b): 2 layers",
        "blocks of\n4 (the anchor and 3 more rows, 3 drafts)",
        "layers 0 and 2",
        'AutoModel.from_pretrained("org/drafter", dtype=target.dtype)',
        "| math | 2.500 |",
        "| all | 2.250 |",
        "are accepted: 75%, 50%.",
        "0.125 of a block",
        "drafter and length head; started from the target's last layers; 200 steps in 2.0 h",
        "greedy, at most 256 tokens, in bfloat16",
        "| math | 90 | 9000 |",
        "| anchors | 512 | what the DFlash family uses |",
        "adaflash train --out new --lr 1e-3",
        "Made on NVIDIA H200 (2 processes) with python 3.11.7, torch 2.13.0, commit f00d.",
        "| 200 | 120 | 2.250 |",
        "It accepts most on math (2.50) and least on code (2.00).",
    ):
        assert expected in text, expected
    assert "/home/someone" not in text and "Stage" not in text
    assert sum(line.startswith("| ") and line.endswith("0 |") for line in text.splitlines()) < 20, "a curve, not a log"


def test_stages_are_told_in_order(directory):
    head = record(previous=record(), settings={"target": "org/target-8b", "init": "x/y", "only": "length-head"})
    (directory / "run.json").write_text(json.dumps(head))
    text = build_drafter_card(directory).content
    assert text.index("### Stage 1: drafter and length head") < text.index("### Stage 2: the length head alone")
    assert "went on from the stage before" in text
    # A drafter whose own record is gone is at least named.
    (directory / "run.json").write_text(json.dumps({**head, "previous": None}))
    assert "went on from y" in build_drafter_card(directory).content


def test_of_many_stages_the_older_are_told_in_a_line_each(directory):
    previous = [record() for _ in range(4)]
    previous[1] |= {"settings": {"init": "runs/x", "only": "drafter"}, "git_commit": None}
    previous[1]["checkpoint"] = "checkpoint-9"
    (directory / "run.json").write_text(json.dumps(record(previous=previous, previous_omitted=2)))
    card = build_drafter_card(directory)
    text = card.content
    for line in (
        "- Stage 3: drafter and length head; started from the target's last layers; 200 steps in 2.0 h, evaluations "
        "included; commit f00d.\n",
        "- Stage 4: the drafter; went on from the stage before; 200 steps in 2.0 h, evaluations included; the next "
        "stage began with its checkpoint-9; commit unknown.\n\n",
        "### Stage 5: drafter and length head\n\nTrained",
    ):
        assert line in text, line
    assert "### Stage 4" not in text and text.count("### Stage") == 3
    assert card.data.datasets == ["org/questions"]


def test_tables_and_results_of_others_are_taken_in(directory):
    result = EvalResult(
        task_type="text-generation",
        dataset_type="openai/gsm8k",
        dataset_name="GSM8K",
        metric_type="speedup",
        metric_value=2.5,
    )
    options = CardOptions(
        base_model="org/other", license="apache-2.0", speed_tables=[("Speed", "| a |\n|---|\n| 1 |")], results=[result]
    )
    card = build_drafter_card(directory, options)
    assert card.data.base_model == "org/other" and card.data.license == "apache-2.0"
    assert card.data.eval_results[-1].dataset_name == "GSM8K"
    assert "## Speed\n\n| a |" in card.content


def test_a_drafter_without_records_gets_a_short_card(directory, tmp_path):
    for name in ("run.json", "metrics.json"):
        (directory / name).unlink()
    card = build_drafter_card(directory)
    assert "## Training" not in card.content and "## Results" not in card.content and card.data.eval_results is None
    # A path on this machine is no name for others.
    tiny_drafter(target_model_name_or_path=str(tmp_path)).save_pretrained(tmp_path / "local")
    card = build_drafter_card(tmp_path / "local")
    assert card.data.base_model is None and str(tmp_path) not in card.content
    with pytest.raises(InvalidInputError, match="which is not there"):
        build_drafter_card(tmp_path / "nothing")


def test_only_what_lies_there_is_offered(directory):
    assert "trust_remote_code=True" in build_drafter_card(directory).content
    for path in directory.glob("*.py"):
        path.unlink()
    assert "trust_remote_code" not in build_drafter_card(directory).content


def test_a_draft_vocabulary_is_told(tmp_path):
    tiny_drafter(target_model_name_or_path="org/target-8b", draft_vocab_size=32).save_pretrained(tmp_path / "drafter")
    text = build_drafter_card(tmp_path / "drafter").content
    assert "own text.\nIt only proposes 32 of the target's tokens; the others are generated as ever.\n\n## Use" in text


def test_the_embedded_target_has_its_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.undo()
    tiny_drafter(target_model_name_or_path="smollm2-135m").save_pretrained(tmp_path / "drafter")
    data = build_drafter_card(tmp_path / "drafter").data
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct" and data.license == "apache-2.0"


def test_the_licence_is_the_targets(tmp_path, monkeypatch):
    monkeypatch.undo()
    tiny_drafter(target_model_name_or_path="org/target-8b").save_pretrained(tmp_path / "drafter")
    with running_hub() as hub:
        hub.repositories["org/target-8b"] = {"README.md": b"---\nlicense: gemma\n---\n# Target\n"}
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        # Only where something is pushed is the Hub asked; afterwards the cache knows.
        assert build_drafter_card(tmp_path / "drafter").data.license is None
        assert not any("org/target-8b" in request for request in hub.requests_seen)
        assert build_drafter_card(tmp_path / "drafter", CardOptions(repo_id="org/d")).data.license == "gemma"
    assert build_drafter_card(tmp_path / "drafter").data.license == "gemma"
    assert build_drafter_card(tmp_path / "drafter", CardOptions(license="mit")).data.license == "mit"


def test_one_domain_is_not_listed_twice():
    assert tau_by_domain({"eval_acceptance_length": 2.0, "eval_acceptance_length_math": 2.0}) == {"math": 2.0}
    assert tau_by_domain({"eval_loss": 1.0}) == {}


def test_the_template_is_part_of_the_package():
    assert resources.files("adaflash_hf").joinpath("model_cards", "drafter.md").is_file()
