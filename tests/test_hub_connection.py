"""Without a network the Hub's client is not left to try again and again, which takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import HubServer, running_hub
from huggingface_hub import constants
from stand_ins import byte_target, byte_tokenizer
from tiny_models import tiny_drafter

from adaflash_hf import hub_connection
from adaflash_hf.commands import serve
from adaflash_hf.commands.loading import load_drafter
from adaflash_hf.embedded_target import load_target
from adaflash_hf.errors import InvalidInputError
from adaflash_hf.hub_connection import hub_or_cache, is_missing_directory
from adaflash_hf.online.inference_process import load_served_drafter
from adaflash_hf.online.published_versions import PublishedVersions
from adaflash_hf.serving.formats import TargetFiles, read_drafter
from adaflash_hf.serving.inspection import inspect_drafter
from adaflash_hf.training.prompt_datasets import PromptDataset, read_prompt_dataset


def cut_off(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Nobody answers at the Hub's address from now on, and whoever would try again fails."""
    monkeypatch.setattr(hub_connection, "_told", set())
    closed = HubServer()
    closed.server_close()
    closed.serve_this_process(monkeypatch, cache)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"waits {seconds} s to try again"))


def files(model: Any, folder: Path) -> dict[str, bytes]:
    model.save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "is_missing"),
    [
        ("org/model", False),
        ("model", False),
        ("models/there", False),
        ("models/nope", True),
        ("./nope", True),
        ("a/b/c", True),
        ("/nope", True),
    ],
)
def test_what_can_only_be_a_directory_is_not_looked_for_at_the_hub(
    name: str, is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "there").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_missing_directory(name, may_lack_owner=True) is is_missing
    if is_missing:
        with pytest.raises(InvalidInputError, match=f"`target` is '{name}' and cannot be loaded .there is no"):
            load_target(name, device="cpu")


@pytest.mark.parametrize(
    "load",
    [
        load_target,
        lambda name: load_drafter(name, byte_target()),
        lambda name: load_served_drafter(PublishedVersions("nowhere"), name, torch.float32),
        lambda name: TargetFiles(name).config,
        read_drafter,
        inspect_drafter,
        serve._tokenizer_of,
        lambda name: read_prompt_dataset(PromptDataset(name)),
    ],
    ids=["target", "drafter", "served", "config", "files", "inspection", "tokenizer", "prompts"],
)
def test_what_is_nowhere_is_told_at_once(
    load: Callable[[str], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cut_off(monkeypatch, tmp_path / "cache")
    with pytest.raises(InvalidInputError, match="org/nothing"):
        load("org/nothing")
    warnings = [record.getMessage() for record in caplog.records if record.name == "adaflash_hf.hub_connection"]
    assert len(warnings) == 1 and constants.ENDPOINT in warnings[0] and "its cache is used" in warnings[0]


def test_what_may_be_a_directory_is_said_not_to_be_one_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    cut_off(monkeypatch, tmp_path / "cache")
    message = "`--drafter` is 'runs/typo' and cannot be loaded .there is no such directory here, and from the Hub: "
    with pytest.raises(InvalidInputError, match=message):
        load_drafter("runs/typo", byte_target())
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "adaflash_hf.hub_connection"]
    assert warning.startswith("There is no directory 'runs/typo' here, and no connection to")
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "other")
        with pytest.raises(InvalidInputError, match=message):
            load_drafter("runs/typo", byte_target())


def test_a_setting_is_not_told_as_a_failed_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for load in (lambda: load_drafter("org/nothing", byte_target()), lambda: load_target("org/nothing", device="cpu")):
        with pytest.raises(InvalidInputError, match="HF_HUB_OFFLINE is set, so that only the Hub's cache was asked"):
            load()


def test_what_is_cached_is_loaded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        hub.repositories["org/target"] = files(byte_target(), tmp_path / "target")
        hub.repositories["org/target"] |= files(byte_tokenizer(), tmp_path / "tokenizer")
        hub.repositories["org/drafter"] = files(tiny_drafter(byte_target()), tmp_path / "drafter")
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        target = load_target("org/target", dtype="float32", device="cpu").model
        drafter = load_drafter("org/drafter", target)
    cut_off(monkeypatch, tmp_path / "cache")
    assert load_target("org/target", dtype="float32", device="cpu").model.lm_head.weight.equal(target.lm_head.weight)
    assert load_drafter("org/drafter", target).fc.weight.equal(drafter.fc.weight)
    assert inspect_drafter("org/drafter").problems == []


def test_only_the_block_works_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        with hub_or_cache("org/nothing"):  # which the Hub says itself
            assert not constants.HF_HUB_OFFLINE
    cut_off(monkeypatch, tmp_path / "cache")
    with hub_or_cache(tmp_path):
        assert not constants.HF_HUB_OFFLINE
    with pytest.raises(ZeroDivisionError), hub_or_cache("org/nothing"):
        assert constants.HF_HUB_OFFLINE
        raise ZeroDivisionError
    assert not constants.HF_HUB_OFFLINE
