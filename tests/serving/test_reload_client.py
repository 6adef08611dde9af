"""Versions are published for real and given to servers over HTTP, which hold real tensors and have SGLang's faults."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from online_traffic import recorded
from sglang_server import SGLangServer
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import InvalidInputError, PublishedVersionError
from adaflash_hf.modeling_dflash_drafter import DFlashDrafterModel
from adaflash_hf.online.published_versions import POINTER_FILE, VersionManifest
from adaflash_hf.online.publisher import Publisher
from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.online.run_status import StatusFile, read_status
from adaflash_hf.serving.acceptance_probe import ServerProbe
from adaflash_hf.serving.draft_payload import draft_weights
from adaflash_hf.serving.reload_client import ReloadClient, ReloadClientSettings
from adaflash_hf.serving.replica import ReplicaAddress


GOOD, BAD = 0.5, -0.5


def skill(draft: dict[str, torch.Tensor]) -> int:
    """Drafts well, unless its last norm says otherwise."""
    return 0 if draft["norm.weight"][0] < 0 else 2


@pytest.fixture(scope="module")
def drafter() -> DFlashDrafterModel:
    return tiny_drafter(tiny_target("llama"))


@pytest.fixture
def published(drafter, tmp_path) -> Publisher:
    """Version 0."""
    publisher = Publisher(tmp_path / "published")
    set_weights(drafter, 1.0)
    publisher.publish(drafter, VersionManifest(0))
    return publisher


def set_weights(drafter: DFlashDrafterModel, value: float) -> None:
    """Other weights in every tensor, which say what they are."""
    generator = torch.Generator().manual_seed(int(value * 1000))
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        drafter.norm.weight.fill_(value)


def publish(publisher: Publisher, drafter: DFlashDrafterModel, value: float) -> int:
    number = publisher.next_version()
    set_weights(drafter, value)
    pointer = publisher.pointer()
    assert pointer is not None
    publisher.publish(drafter, VersionManifest(number, parent=pointer.version))
    return number


def expected(publisher: Publisher, version: int) -> dict[str, torch.Tensor]:
    return dict(draft_weights(publisher.path_of(version), has_plugin=False).tensors)


def serving(publisher: Publisher, **fields: Any) -> SGLangServer:
    """A server that was started with version 0; its target has tensors of the drafter's names."""
    draft = expected(publisher, 0)
    target = {
        name: torch.full_like(tensor, 3.0) for name, tensor in draft.items() if name.startswith(("layers", "norm"))
    }
    path = str(publisher.path_of(0))
    return SGLangServer(**{"draft": draft, "target": target, "skill": skill, "draft_path": path, **fields})


@contextmanager
def watching(publisher: Publisher, *servers: SGLangServer, **settings: Any) -> Iterator[ReloadClient]:
    probe = settings.pop("probe", ServerProbe(num_prompts=4))
    keys = {"api_key": servers[0].api_key, "admin_api_key": servers[0].admin_api_key}
    with ExitStack() as stack:
        addresses = [ReplicaAddress(stack.enter_context(server.run()).url, **keys) for server in servers]
        client = ReloadClient(publisher.directory, addresses, ReloadClientSettings(poll_s=0.02, **settings), probe)
        try:
            yield client
        finally:
            client.close()


def assert_serves(server: SGLangServer, publisher: Publisher, version: int) -> None:
    for name, tensor in expected(publisher, version).items():
        torch.testing.assert_close(server.draft[name], tensor, rtol=0, atol=0)
    assert all(bool((tensor == 3.0).all()) for tensor in server.target.values())
    assert server.session is None and not server.is_paused


def test_a_new_version_reaches_every_server_and_only_its_drafter(published, drafter):
    servers = [serving(published), serving(published, tp_size=2)]
    with watching(published, *servers) as client:
        version = publish(published, drafter, GOOD)
        assert client.check()
        status = client.status
    for server in servers:
        assert_serves(server, published, version)
        assert server.weight_version == "adaflash-1"
        assert "/update_weights_from_disk" not in server.paths and "/update_weight_version" not in server.paths
        updates = [body for path, body in server.calls if path == "/update_weights_from_tensor"]
        assert all(body["selector"] == "draft" and body["flush_cache"] is False for body in updates)
    assert [one["version"] for one in status["replicas"]] == [1, 1]
    assert status["replicas"][0]["acceptance_after"] == pytest.approx(3.0)
    written = read_status(published.directory, "reload-client")
    assert (written["state"], written["version"]) == ("up to date", 1)


def test_requests_wait_only_while_tensors_are_written(published, drafter):
    server = serving(published)
    with watching(published, server, bucket_bytes=4096) as client:
        publish(published, drafter, GOOD)
        assert client.check()
    control = [path for path in server.paths if not path.startswith("/v1") and "info" not in path]
    begin, end = control.index("/pause_generation"), control.index("/continue_generation")
    during = control[begin + 1 : end]
    assert during[0] == "/begin_weight_update" and during[-1] == "/end_weight_update"
    assert set(during[1:-1]) == {"/update_weights_from_tensor"} and len(during) > 4
    labels = [b.get("weight_version") for path, b in server.calls if path == "/update_weights_from_tensor"]
    assert labels == [None] * (len(labels) - 1) + ["adaflash-1"]


def test_nothing_happens_to_a_server_that_has_it(published, drafter):
    server = serving(published)
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        client.check()
        calls = len(server.calls)
        assert client.check()
        assert server.paths[calls:] == ["/model_info"]


def test_a_version_that_drafts_badly_is_taken_back(published, drafter):
    first, second = serving(published), serving(published)
    with watching(published, first, second) as client:
        good = publish(published, drafter, GOOD)
        assert client.check()
        bad = publish(published, drafter, BAD)
        assert not client.check()
        assert_serves(first, published, good)
        assert first.weight_version == second.weight_version == "adaflash-1"
        assert not any(body.get("weight_version") == f"adaflash-{bad}" for _, body in second.calls)
        assert "accepts 0 drafts" in client.status["refused"][bad]
        # Not tried again, but a server that comes back is given what the others have.
        calls = len(first.calls)
        second.weight_version, second.draft = "default", expected(published, 0)
        assert not client.check()
        assert_serves(second, published, good)
        assert "/update_weights_from_tensor" not in first.paths[calls:]


def test_a_person_may_insist(published, drafter):
    server = serving(published)
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        bad = publish(published, drafter, BAD)
        assert not client.check()
        published.rollback(to=bad)
        assert client.check()
        assert_serves(server, published, bad)
        published.rollback(to=1)
        assert client.check()
        assert_serves(server, published, 1)


def test_prompts_come_from_the_traffic(published, drafter, tmp_path):
    buffer = ReplayBuffer(tmp_path / "buffer")
    buffer.append([recorded(seed) for seed in range(40)])
    server = serving(published)
    with watching(published, server, probe=ServerProbe(buffer.path, num_prompts=3)) as client:
        publish(published, drafter, GOOD)
        assert client.check()
    asked = [body for path, body in server.calls if path == "/v1/completions"]
    assert len(asked) == 6 and all(len(body["prompt"]) == 5 for body in asked)
    assert [body["prompt"] for body in asked[:3]] == [body["prompt"] for body in asked[3:]]
    assert len({body["cache_salt"] for body in asked}) == 2  # nothing of before is in a cache


def test_a_server_that_updates_its_target_as_well_is_left_alone_from_then_on(published, drafter):
    server = serving(published, faults={"ignores_selector"})
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert not client.check()
        (status,) = client.status["replicas"]
        assert status["is_damaged"] and "changed 17 tensors of the target" in status["error"]
        calls = len(server.calls)
        assert not client.check()
        assert len(server.calls) == calls


def test_tensors_skipped_without_a_word_are_noticed(published, drafter):
    server = serving(published, faults={"skips_names"})
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert not client.check()
        (status,) = client.status["replicas"]
        assert "reported success and left" in status["error"] and "layers.1." in status["error"]
        assert_serves(server, published, 0)
        server.faults.clear()
        assert client.check()
        assert_serves(server, published, 1)


def test_a_broken_connection_leaves_the_old_version_and_is_tried_again(published, drafter):
    server, other = serving(published, faults={"loses_connection"}), serving(published)
    with watching(published, server, other) as client:
        publish(published, drafter, GOOD)
        assert not client.check()
        assert "does not answer /update_weights_from_tensor" in client.status["replicas"][0]["error"]
        assert_serves(server, published, 0)
        assert_serves(other, published, 1)
        assert client.check()
        assert_serves(server, published, 1)


def test_a_session_that_a_killed_client_left_open(published, drafter):
    server = serving(published, session="draft", is_paused=True)
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert client.check()
        assert_serves(server, published, 1)


def test_a_server_that_goes_down_midway_starts_from_what_it_had(published, drafter):
    server, other = serving(published), serving(published)
    with watching(published, server, other, bucket_bytes=4096) as client:
        publish(published, drafter, GOOD)
        server.faults = {"goes_down"}
        assert not client.check()
        assert "Going back failed as well" in client.status["replicas"][0]["error"]
        assert client.status["unfinished"] == {server.url: "default"}
        assert read_status(published.directory, "reload-client")["unfinished"] == {server.url: "default"}
        assert_serves(other, published, 1)
        assert not client.check(), "it is still away"
        server.faults = set()
        calls = len(server.calls)
        assert client.check()
        labels = [body["weight_version"] for _, body in server.calls[calls:] if "weight_version" in body]
        assert labels == ["default", "adaflash-1"], "first back, then on"
        assert_serves(server, published, 1)
        assert client.status["unfinished"] == {}
        assert client.status["replicas"][0]["acceptance_before"] == pytest.approx(3.0), "it was a whole drafter's"


def test_a_server_that_went_down_midway_goes_back_although_another_refused_the_version(published, drafter):
    server, other = serving(published), serving(published)
    with watching(published, server, other, bucket_bytes=4096) as client:
        publish(published, drafter, BAD)
        server.faults = {"goes_down"}
        assert not client.check()
        assert "accepts 0 drafts" in client.status["refused"][1] and server.url in client.status["unfinished"]
        server.faults = set()
        assert not client.check()
        assert_serves(server, published, 0)
        assert_serves(other, published, 0)
        assert client.status["unfinished"] == {}


def test_a_client_that_is_killed_before_it_has_looked_whether_a_version_is_good(published, drafter):
    """The server has the version and says so; nobody would ever look again."""
    killed = threading.Event()
    server = serving(published)

    def answer(text: str) -> str:
        if server.weight_version == "adaflash-1":
            killed.wait(600)
        return text

    server.answer = answer
    with server.run():
        publish(published, drafter, BAD)
        command = [sys.executable, "-m", "adaflash_hf.cli", "serve", "reload", "--replica", server.url]
        command += ["--publish-dir", str(published.directory), "--probe-prompts", "1"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while server.weight_version != "adaflash-1" or server.paths[-1] != "/v1/chat/completions":
                assert process.poll() is None
                time.sleep(0.01)
            process.kill()
        killed.set()
        probe = ServerProbe(num_prompts=1)
        client = ReloadClient(published.directory, [ReplicaAddress(server.url)], ReloadClientSettings(), probe)
        assert not client.run_once()
        assert "accepts 0 drafts" in client.status["refused"][1]
        client.close()
    assert server.weight_version == "default"
    assert_serves(server, published, 0)


def test_what_was_left_open_is_closed_although_the_version_is_there(published, drafter):
    server = serving(published)
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert client.run_once()
        server.session, server.is_paused = "draft", True
        assert client.run_once()
        assert server.session is None and not server.is_paused


def test_a_cut_off_update_that_cannot_be_undone(published, drafter):
    server = serving(published, weight_version="adaflash-1")
    publish(published, drafter, GOOD)
    with watching(published, server) as client:
        StatusFile(published.directory, "reload-client").update(unfinished={server.url: "adaflash-77"})
        assert client.run_once(), "there is nothing to go back to, so what is there stays"
        assert client.status["unfinished"] == {}
        assert "/update_weights_from_tensor" not in server.paths
        StatusFile(published.directory, "reload-client").update(unfinished=[1])
        assert client.run_once()


def test_one_process_for_a_directory(published, drafter):
    with watching(published, serving(published)) as client, client._alone():
        with pytest.raises(PublishedVersionError, match="another process updates servers"):
            ReloadClient(published.directory, [ReplicaAddress("http://127.0.0.1:9")]).run_once()


def test_keys(published, drafter):
    server = serving(published, api_key="user", admin_api_key="admin")
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert client.check()
        assert "user" not in json.dumps(client.status) and "admin" not in repr(client._replicas[0].address)
    with watching(published, server) as client:
        client._replicas[0].address = ReplicaAddress(server.url, "wrong")
        assert not client.check()
        assert "check the API keys" in client.status["replicas"][0]["error"]


def test_damaged_files_never_leave_the_disk(published, drafter):
    server = serving(published)
    with watching(published, server) as client:
        version = publish(published, drafter, GOOD)
        with (published.path_of(version) / "model.safetensors").open("r+b") as file:
            file.seek(-8, 2)
            file.write(b"12345678")
        assert not client.check()
        assert "/pause_generation" not in server.paths
        assert "checksum" in client.status["refused"][version]


def test_without_a_way_back_nothing_is_changed(published, drafter):
    server = serving(published, draft_path="/nowhere", weight_version="adaflash-9")
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert not client.check()
        assert "there would be no way back" in client.status["replicas"][0]["error"]
        assert "/pause_generation" not in server.paths


def test_it_watches_until_it_is_stopped(published, drafter):
    server = serving(published)
    with watching(published, server) as client:
        thread = threading.Thread(target=client.run)
        thread.start()
        try:
            publish(published, drafter, GOOD)
            deadline = time.monotonic() + 300
            while server.weight_version != "adaflash-1" and time.monotonic() < deadline:
                time.sleep(0.01)
            with pytest.raises(PublishedVersionError, match="another process updates"):
                client._alone()
        finally:
            client.stop()
            thread.join()
    assert_serves(server, published, 1)
    assert read_status(published.directory, "reload-client")["state"] == "stopped"


def test_servers_that_do_not_speculate(published, drafter):
    server = serving(published, algorithm=None)
    with watching(published, server) as client:
        publish(published, drafter, GOOD)
        assert not client.check()
        assert "does not speculate" in client.status["replicas"][0]["error"]


def test_before_anything_is_published(tmp_path):
    client = ReloadClient(tmp_path, [ReplicaAddress("http://127.0.0.1:9")])
    assert not client.check()
    assert read_status(tmp_path, "reload-client")["waiting_for"] == "a first version"
    client.close()


def test_that_it_waits_for_a_first_version_is_told_once(published, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "adaflash_hf.serving.reload_client")
    client = ReloadClient(
        tmp_path / "later", [ReplicaAddress("http://127.0.0.1:9")], ReloadClientSettings(poll_s=0.001)
    )
    looks = []

    def check():
        looks.append(ReloadClient.check(client))
        if len(looks) == 3:
            client.stop()

    monkeypatch.setattr(client, "check", check)
    client.run()
    monkeypatch.undo()
    assert looks == [False] * 3
    told = f"Nothing is published in {tmp_path / 'later'} yet; waiting for a first version."
    assert [text for text in caplog.messages if "published" in text] == [told]
    assert not client.run_once()
    assert any(text.endswith("yet; servers keep what they have.") for text in caplog.messages)
    client.close()
    caplog.clear()
    with watching(published, serving(published)) as client:
        assert client.run_once()
    assert not any("yet" in text for text in caplog.messages)


def test_a_pointer_that_cannot_be_read_is_told_once(published, caplog):
    (published.directory / POINTER_FILE).write_text("{}", encoding="utf-8")
    client = ReloadClient(published.directory, [ReplicaAddress("http://127.0.0.1:9")])
    assert not client.check() and not client.check()
    assert len([text for text in caplog.messages if "is damaged" in text]) == 1
    client.close()


def test_arguments(tmp_path):
    one = ReplicaAddress("http://localhost:1")
    with pytest.raises(InvalidInputError, match="at least one server"):
        ReloadClient(Path(tmp_path), [])
    with pytest.raises(InvalidInputError, match="each once"):
        ReloadClient(Path(tmp_path), [one, one])
    with pytest.raises(InvalidInputError, match="`replica` is 'localhost:1'"):
        ReplicaAddress("localhost:1")
    with pytest.raises(InvalidInputError, match="`min_relative_acceptance`"):
        ReloadClientSettings(min_relative_acceptance=2)
