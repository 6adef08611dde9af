from __future__ import annotations

import json

import pytest
from full_disk import full_after
from hub_server import running_hub
from huggingface_hub import ModelCard
from test_card_measurements import bench_data
from tiny_checkpoints import HEAD
from tiny_models import tiny_drafter

from adaflash_hf import hub_upload, model_card
from adaflash_hf.cli import main


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setattr(model_card, "_license_of", lambda base_model, *, may_download: "mit")
    path = tmp_path / "my-drafter"
    tiny_drafter(target_model_name_or_path="org/target-8b", length_head_config=HEAD).save_pretrained(path)
    (path / "metrics.json").write_text(json.dumps({"eval_acceptance_length": 2.25}))
    return path


def test_help(capsys):
    assert main(["card", "--help"]) == 0
    assert "README.md of DRAFTER" in " ".join(capsys.readouterr().out.split())


def test_a_card_from_measured_files(directory, capsys):
    (directory / "adaflash-bench.json").write_text(json.dumps(bench_data()))
    assert main(["card", str(directory), "--repo-id", "org/drafter", "--license", "apache-2.0"]) == 0
    card = ModelCard.load(directory / "README.md")
    assert card.data.license == "apache-2.0"
    assert [result.metric_value for result in card.data.eval_results] == [2.25, 2.5, 2.5]
    for expected in (
        "## Speed and tau on gsm8k, Some CPU",
        "| adaflash | 8 | 25.0 | 2.50x |",
        "adaflash export org/drafter drafter-sglang --to sglang --target org/target-8b",
        "sglang serve --model-path org/target-8b --speculative-algorithm DFLASH",
        "adaflash export org/drafter drafter-sglang-plugin --to sglang-plugin --target org/target-8b",
        "vllm serve org/target-8b",
    ):
        assert expected in card.content, expected


def test_what_was_measured_later_is_taken_up(directory, capsys):
    assert main(["card", str(directory)]) == 0
    before = (directory / "README.md").read_text()
    assert "2.250" in before
    (directory / "metrics.json").write_text(json.dumps({"eval_acceptance_length": 3.5}))
    assert main(["card", str(directory)]) == 0
    assert (directory / "README.md").read_text() == before.replace("2.250", "3.500").replace("2.25", "3.5")


def test_a_card_by_hand_is_kept(directory, capsys):
    (directory / "README.md").write_text("# Mine\n")
    assert main(["card", str(directory)]) == 2
    assert "not written by this command" in capsys.readouterr().err
    assert (directory / "README.md").read_text() == "# Mine\n"
    assert main(["card", str(directory), "--force"]) == 0
    assert "# Mine" not in (directory / "README.md").read_text()


def test_a_full_disk_leaves_the_card_before(directory, capsys):
    assert main(["card", str(directory)]) == 0
    before = (directory / "README.md").read_text()
    with full_after(model_card, "build_drafter_card", 1, room_bytes=1_000):
        assert main(["card", str(directory), "--repo-id", "org/drafter"]) == 2
    assert "Make room" in capsys.readouterr().err
    assert (directory / "README.md").read_text() == before and not list(directory.glob("*.partial"))


def test_notes_stand_where_they_belong(directory, tmp_path, capsys):
    notes = tmp_path / "notes.md"
    notes.write_text("# For us\n\n## Training\n\nOn a train.\n\n## Intended use and limits\n\n- Trains only.\n")
    assert main(["card", str(directory), "--notes", str(notes)]) == 0
    text = (directory / "README.md").read_text()
    assert "\n\n## Training\n\nOn a train.\n\n## Intended use and limits\n\nFor org/target-8b" in text
    assert "slower, not different.\n\n- Trains only.\n\n## References" in text
    assert "For us" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("On a train.\n", "with the headings none; write under '## Training'"),
        ("## Training\n\n## Licence\n", "with the headings 'Training', 'Licence'"),
        (None, "cannot be read"),
    ],
)
def test_notes_that_would_get_lost_are_refused(text, message, directory, tmp_path, capsys):
    if text is not None:
        (tmp_path / "notes.md").write_text(text)
    assert main(["card", str(directory), "--notes", str(tmp_path / "notes.md")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (directory / "README.md").exists()


def test_nothing_is_made_on_the_hub_for_a_card_that_cannot_be_written(directory, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hub_upload, "reserve_repository", None)
    push = ["--push", "--repo-id", "org/drafter"]
    assert main(["card", str(directory), *push, "--notes", str(tmp_path / "none.md")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["card", str(tmp_path / "empty"), *push]) == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--push"], "without `--repo-id`"),
        (["--private"], "without `--push`"),
        (["--bench", "nothing.json"], "nothing.json"),
        (["--repo-id", "org/my/drafter"], "give it as org/name"),
    ],
)
def test_refused_before_anything_is_written(options, message, directory, capsys):
    assert main(["card", str(directory), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (directory / "README.md").exists()


def test_what_is_not_there_is_not_asked_of_the_hub(tmp_path, capsys):
    assert main(["card", str(tmp_path / "none")]) == 2
    assert "which is not there" in capsys.readouterr().err


def test_a_card_by_hand_on_the_hub_is_kept(directory, tmp_path, monkeypatch, capsys):
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        hub.repositories["org/drafter"] = {"README.md": b"# Mine\n"}
        push = ["card", str(directory), "--repo-id", "org/drafter", "--push"]
        assert main(push) == 2
        assert "give --force" in capsys.readouterr().err and not (directory / "README.md").exists()
        assert hub.repositories["org/drafter"] == {"README.md": b"# Mine\n"}
        assert main([*push, "--force"]) == 0
        assert b"# Mine" not in hub.repositories["org/drafter"]["README.md"]


def test_pushed_with_the_weights(directory, tmp_path, monkeypatch, capsys):
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        assert main(["card", str(directory), "--repo-id", "org/drafter", "--push"]) == 0
        files = hub.repositories["org/drafter"]
    assert {"README.md", "model.safetensors", "config.json"} <= set(files)
    assert b'AutoModel.from_pretrained("org/drafter"' in files["README.md"]
