from __future__ import annotations

import errno

import pytest
from hub_server import running_hub
from huggingface_hub import constants
from tiny_models import tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import InvalidInputError, OutputError
from adaflash_hf.hub_upload import reserve_repository, talking_to_hub, upload_drafter


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with running_hub() as server:
        server.serve_this_process(monkeypatch, tmp_path / "cache")
        yield server


def test_a_drafter_is_pushed_without_the_records_of_its_machine(hub, tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# A card\n")
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "config.json").write_text("{}")
    reserve_repository("org/drafter")
    assert hub.repositories["org/drafter"] == {}
    assert hub.endpoint in upload_drafter(tmp_path, "org/drafter")
    files = hub.repositories["org/drafter"]
    assert {"README.md", "config.json", "model.safetensors", "modeling_dflash_drafter.py"} <= set(files)
    assert "run.json" not in files and not any("/" in name for name in files)
    assert files["README.md"] == b"# A card\n"
    # Again, now that it is there.
    reserve_repository("org/drafter")


def test_what_the_hub_refuses_is_refused_at_once(hub, monkeypatch):
    with pytest.raises(InvalidInputError, match="not a name"):
        reserve_repository("not a name")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InvalidInputError, match=r"neither found nor created .* that http://127.0.0.1:9 can"):
        reserve_repository("org/drafter")


def test_a_connection_that_breaks_later_is_told_too(hub, tmp_path, monkeypatch):
    tiny_drafter().save_pretrained(tmp_path)
    reserve_repository("org/drafter")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(InvalidInputError, match=r"'org/drafter', and exchanging files with it failed .* push again"):
        upload_drafter(tmp_path, "org/drafter")
    # What is not the Hub's is not said to be.
    for error in (OutputError("elsewhere"), OSError(errno.ENOSPC, "No space left on device")):
        with pytest.raises(type(error)) as raised, talking_to_hub("org/drafter"):
            raise error
        assert raised.value is error


def test_push_to_hub_writes_a_card(hub, tmp_path):
    tiny_drafter().save_pretrained(tmp_path)
    (tmp_path / "metrics.json").write_text('{"eval_acceptance_length": 2.75}')
    drafter = DFlashDrafterModel.from_pretrained(tmp_path)
    drafter.push_to_hub("org/drafter")
    card = hub.repositories["org/drafter"]["README.md"].decode()
    assert 'AutoModel.from_pretrained("org/drafter"' in card and "2.750" in card
    # What somebody wrote on the Hub stays.
    hub.repositories["org/drafter"]["README.md"] = b"---\ntags:\n- adaflash\n---\n# By hand\n"
    drafter.push_to_hub("org/drafter")
    assert "# By hand" in hub.repositories["org/drafter"]["README.md"].decode()
