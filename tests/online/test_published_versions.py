from __future__ import annotations

import json

import pytest
from published_drafters import adapted_drafter, publish

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.errors import PublishedVersionError
from adaflash_hf.online.published_versions import MANIFEST_FILE, POINTER_FILE, PublishedVersions, VersionManifest
from adaflash_hf.online.publisher import Publisher


@pytest.fixture
def directory(tmp_path):
    publisher = Publisher(tmp_path)
    for seed in range(3):
        publish(publisher, adapted_drafter(seed), trajectories={"math": 128 * seed})
    return tmp_path


def test_nothing_published_is_nothing_to_serve(tmp_path):
    versions = PublishedVersions(tmp_path / "not" / "yet")
    assert versions.latest() is None
    assert versions.numbers() == []


def test_the_latest_version_is_a_checkpoint_with_its_history(directory):
    versions = PublishedVersions(directory)
    assert versions.numbers() == [0, 1, 2]
    latest = versions.latest()
    assert (latest.version, latest.manifest.parent, latest.manifest.trajectories) == (2, 1, {"math": 256})
    latest.check_files()
    loaded = DFlashDrafterModel.from_pretrained(latest.path).state_dict()
    assert all(loaded[name].equal(tensor) for name, tensor in adapted_drafter(2).state_dict().items())


def test_a_manifest_survives_the_disk(tmp_path):
    manifest = VersionManifest(3, parent=2, round_id=9, settings={"lr": 1e-4}, acceptance_after={"all": 2.5})
    (tmp_path / MANIFEST_FILE).write_text(manifest.to_json())
    assert VersionManifest.read(tmp_path) == manifest


def damage_weights(directory):
    path = directory / "version-00000002" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def add_file(directory):
    (directory / "version-00000002" / "pytorch_model.bin").write_bytes(b"pickle")


def lose_file(directory):
    (directory / "version-00000002" / "config.json").unlink()


@pytest.mark.parametrize("change", [damage_weights, add_file, lose_file])
def test_files_are_those_that_were_published(directory, change):
    change(directory)
    with pytest.raises(PublishedVersionError, match=r"`(model.safetensors|pytorch_model.bin|config.json)`.*rollback"):
        PublishedVersions(directory).latest().check_files()


def test_a_missing_or_renamed_version_is_named(directory):
    with pytest.raises(PublishedVersionError, match=r"Version 7 .*\[0, 1, 2\]"):
        PublishedVersions(directory).get(7)
    (directory / "version-00000001").rename(directory / "version-00000007")
    with pytest.raises(PublishedVersionError, match="says that it is version 1"):
        PublishedVersions(directory).get(7)


@pytest.mark.parametrize("content", ["", "[1]", '{"version": "1"}', '{"version": 1, "colour": "red"}', "\x00\x01"])
def test_a_damaged_pointer_is_an_error_not_a_guess(directory, content):
    (directory / POINTER_FILE).write_text(content)
    with pytest.raises(PublishedVersionError, match=POINTER_FILE):
        PublishedVersions(directory).latest()


def test_a_manifest_of_a_later_format_is_refused(directory):
    path = directory / "version-00000002" / MANIFEST_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with pytest.raises(PublishedVersionError, match="another format"):
        PublishedVersions(directory).latest()
