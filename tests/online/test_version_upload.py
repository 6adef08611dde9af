from __future__ import annotations

import pytest
import torch
from hub_server import running_hub
from published_drafters import adapted_drafter, publish

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.online.online_trainer import STATE_DIRECTORY
from adaflash_hf.online.published_versions import VersionManifest
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.training_state import TrainingProgress, TrainingStateStore
from adaflash_hf.online.version_upload import adaptation_section, push_version


SETTINGS = {
    "objective": "mixture",
    "learning_rate": 3e-4,
    "length_head_learning_rate": 2e-4,
    "round_size": 128,
    "epochs": 2,
}


def figures(before, after):
    return {"held_out_before": {"all": before, "math": before}, "held_out_after": {"all": after, "math": after}}


def entry(version, before, after, outcome="published"):
    return {"version": version, "outcome": outcome, **figures(before, after)}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running_hub() as server:
        server.serve_this_process(monkeypatch, tmp_path / "cache")
        yield server


def test_the_section_tells_of_the_version_and_what_it_was_made_from():
    manifest = VersionManifest(
        3,
        parent=1,
        settings=SETTINGS,
        trajectories={"math": 200, "code": 56},
        acceptance_before={"all": 2.2, "math": 2.2},
        acceptance_after={"all": 2.5, "math": 2.5},
    )
    history = [entry(1, 2.0, 2.2), entry(1, 2.2, 1.0, "rejected"), entry(2, 2.2, 2.3)]  # 2 was withdrawn
    section = adaptation_section(manifest, [3, 1, 0], history)
    assert "256 responses of the target to live traffic (56 code, 200 math)" in section
    assert "Objective mixture, learning rates of at most 0.0003 (drafter) and 0.0002 (length head)" in section
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    assert rows[2:] == [["1", "math", "2.000", "2.200", "+0.200"], ["3", "math", "2.200", "2.500", "+0.300"]]
    assert "not adapted" in adaptation_section(VersionManifest(0), [0], [])


def test_a_version_is_pushed_with_its_card_and_stays_as_it_is(hub, tmp_path):
    place = tmp_path / "published"
    publisher = Publisher(place)
    publish(publisher, adapted_drafter())
    fields = {"acceptance_before": {"all": 2.0}, "acceptance_after": {"all": 2.25}, "trajectories": {"chat": 128}}
    publish(publisher, adapted_drafter(1), settings=SETTINGS, **fields)
    model = adapted_drafter(1)
    optimizer = torch.optim.AdamW(model.parameters())
    TrainingStateStore(place / STATE_DIRECTORY).save(model, optimizer, TrainingProgress(history=[entry(1, 2, 2.25)]))
    assert hub.endpoint in push_version(place, "org/adapted", license="mit")
    files = hub.repositories["org/adapted"]
    assert {"README.md", "config.json", "model.safetensors"} <= files.keys()
    assert "adaptation.json" not in files
    card = files["README.md"].decode()
    assert "128 responses of the target to live traffic (128 chat)" in card
    assert "+0.250" in card
    assert "license: mit" in card
    publisher.latest().check_files()
    push_version(place, "org/first", version=0, license="mit")
    assert "not adapted" in hub.repositories["org/first"]["README.md"].decode()


def test_without_a_version_nothing_is_pushed(hub, tmp_path):
    with pytest.raises(InvalidInputError, match="nothing is published"):
        push_version(tmp_path, "org/adapted")
    assert hub.repositories == {}
