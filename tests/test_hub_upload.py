from __future__ import annotations

import errno

import pytest
from hub_server import HubRequestHandler, running_hub
from huggingface_hub import HfApi, constants
from tiny_models import tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import InvalidInputError, OutputError
from adaflash_hf.hub_upload import check_card_on_hub, reserve_repository, talking_to_hub, upload_drafter


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


def test_a_card_by_hand_stays_unless_it_is_to_go(hub, tmp_path, caplog):
    tiny_drafter().save_pretrained(tmp_path)
    (tmp_path / "README.md").write_text("# New\n")
    reserve_repository("org/drafter")
    files = hub.repositories["org/drafter"]
    # Of transformers' template, or metadata alone as the Hub's web page makes them: nothing is lost.
    for text in ("# Model\n\n[More Information Needed]\n", "---\nlicense: mit\n---\n", ""):
        files["README.md"] = text.encode()
        check_card_on_hub("org/drafter")
        upload_drafter(tmp_path, "org/drafter")
        assert files["README.md"] == b"# New\n"
    files["README.md"] = b"---\nlicense: mit\n---\n# By hand\n"
    with pytest.raises(InvalidInputError, match=r"README\.md of org/drafter on the Hub was not written .* --force"):
        check_card_on_hub("org/drafter")
    del files["model.safetensors"]
    upload_drafter(tmp_path, "org/drafter")
    assert b"# By hand" in files["README.md"] and "model.safetensors" in files
    assert "of org/drafter was written by hand and stays as it is" in caplog.text
    upload_drafter(tmp_path, "org/drafter", replace_card=True)
    assert files["README.md"] == b"# New\n"


def test_weights_of_an_earlier_drafter_are_not_left_beside(hub, tmp_path):
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    drafter.save_pretrained(tmp_path / "whole")
    reserve_repository("org/drafter")
    files = hub.repositories["org/drafter"]
    files |= {"other/notes.safetensors": b"of somebody", "adapter_model.safetensors": b"an adapter's"}
    for directory in ("shards", "whole", "shards"):
        upload_drafter(tmp_path / directory, "org/drafter")
        weights = {name for name in files if ".safetensors" in name}
        there = {path.name for path in (tmp_path / directory).glob("*.safetensors*")}
        assert weights == there | {"other/notes.safetensors", "adapter_model.safetensors"}
    assert len(weights) > 3


def test_push_to_hub_leaves_no_weights_of_an_earlier_drafter(hub):
    for seed, size in ((1, "20KB"), (2, "1GB"), (3, "20KB")):
        drafter = tiny_drafter(seed=seed)
        drafter.push_to_hub("org/drafter", max_shard_size=size)
        loaded = DFlashDrafterModel.from_pretrained("org/drafter", force_download=True)
        assert all(tensor.equal(loaded.state_dict()[name]) for name, tensor in drafter.state_dict().items())
        is_whole = "model.safetensors" in hub.repositories["org/drafter"]
        assert is_whole == (size == "1GB") != ("model.safetensors.index.json" in hub.repositories["org/drafter"])


def test_a_change_meanwhile_is_not_overwritten(hub, tmp_path, monkeypatch):
    tiny_drafter().save_pretrained(tmp_path)
    reserve_repository("org/drafter")
    prepare = HfApi.preupload_lfs_files

    def somebody_else_pushes(*args, **kwargs):
        hub.repositories["org/drafter"]["README.md"] = b"# By hand\n"
        return prepare(*args, **kwargs)

    monkeypatch.setattr(HfApi, "preupload_lfs_files", somebody_else_pushes)
    with pytest.raises(InvalidInputError, match="push again"):
        upload_drafter(tmp_path, "org/drafter")
    assert hub.repositories["org/drafter"] == {"README.md": b"# By hand\n"}


def test_what_is_no_hub_is_told(hub, tmp_path, monkeypatch):
    tiny_drafter().save_pretrained(tmp_path)
    reserve_repository("org/drafter")
    page = b"<html>Please log in to the guests' network</html>"
    monkeypatch.setattr(HubRequestHandler, "do_POST", lambda handler: handler._answer(200, page))
    with pytest.raises(InvalidInputError, match="can be reached and is a Hub, and that you are logged in"):
        reserve_repository("org/another")
    with pytest.raises(InvalidInputError, match="may write there, and push again"):
        upload_drafter(tmp_path, "org/drafter")


def test_offline_is_said_to_be_a_setting(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidInputError, match="HF_HUB_OFFLINE is set, which forbids asking it: unset it"):
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
