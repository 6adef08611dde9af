from __future__ import annotations

import os
import random
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from online_traffic import in_fork, kill_after
from published_drafters import adapted_drafter, publish, publish_constant
from safetensors.torch import load_file

from adaflash_hf.errors import InvalidInputError, PublishedVersionError
from adaflash_hf.online.published_versions import PublishedVersions, VersionManifest
from adaflash_hf.online.publisher import Publisher, VersionConflictError
from adaflash_hf.training.lora import add_lora


NOBODY = 65534


def weights_of(version):
    return load_file(version.path / "model.safetensors")


def test_versions_grow_and_the_pointer_follows(tmp_path):
    publisher = Publisher(tmp_path)
    assert [publish(publisher, adapted_drafter(seed)) for seed in range(3)] == [0, 1, 2]
    assert publisher.pointer().version == 2
    assert publisher.pointer().reason == "published"
    assert not publisher.pointer().is_forced


def test_published_weights_may_be_rounded(tmp_path):
    version = Publisher(tmp_path).publish(adapted_drafter(), VersionManifest(0), dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in weights_of(version).values()} == {torch.bfloat16}


def test_an_adapter_is_merged_and_kept_beside(tmp_path):
    base = adapted_drafter()
    base.save_pretrained(tmp_path / "base")
    adapted = add_lora(adapted_drafter(), rank=2, base_name_or_path=tmp_path / "base")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    version = Publisher(tmp_path / "out").publish(adapted, VersionManifest(0), base=base)
    version.check_files()
    merged = weights_of(version)
    assert merged.keys() == base.state_dict().keys()
    assert not merged["fc.weight"].equal(base.fc.weight)
    assert (version.path / "adapter" / "adapter_config.json").exists()


def poisoned(value):
    drafter = adapted_drafter()
    with torch.no_grad():
        drafter.layers[1].mlp.up_proj.weight[2, 3] = value
    return drafter


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_published(tmp_path, value):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter())
    with pytest.raises(PublishedVersionError, match=r"up_proj.*not finite"):
        publish(publisher, poisoned(value))
    assert publisher.pointer().version == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".publish-lock", "latest.json", "version-00000000"]


def test_another_drafter_is_not_published_in_its_place(tmp_path):
    publisher = Publisher(tmp_path)
    with pytest.raises(PublishedVersionError, match="target_model_name_or_path"):
        other = adapted_drafter(target_model_name_or_path="org/other")
        publisher.publish(other, VersionManifest(0), base=adapted_drafter())
    assert publisher.latest() is None


def test_publishing_again_after_a_kill_only_points(tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    manifest = VersionManifest(1, parent=0)
    publisher.publish(adapted_drafter(2), manifest)
    (tmp_path / "latest.json").write_text('{"version": 0}')  # killed between renaming and pointing
    version = publisher.publish(adapted_drafter(3), manifest)
    assert weights_of(version)["fc.weight"].equal(adapted_drafter(2).fc.weight)
    assert publisher.pointer().version == 1
    assert publisher.publish(adapted_drafter(3), manifest).version == 1


def test_a_version_of_another_parent_is_a_conflict(tmp_path):
    publisher = Publisher(tmp_path)
    for seed in range(3):
        publish(publisher, adapted_drafter(seed))
    publisher.rollback()
    with pytest.raises(VersionConflictError, match="version 1 is served"):
        publisher.publish(adapted_drafter(3), VersionManifest(3, parent=2))
    # And a trainer killed after renaming, before pointing, does not undo a roll back.
    with pytest.raises(VersionConflictError, match="withdrawn|served"):
        publisher.publish(adapted_drafter(3), VersionManifest(2, parent=1))
    assert publisher.pointer().version == 1


def test_roll_back_and_forth(tmp_path):
    publisher = Publisher(tmp_path)
    for seed in range(4):
        publish(publisher, adapted_drafter(seed))
    assert publisher.rollback().version == 2
    assert publisher.rollback().version == 1
    pointer = publisher.pointer()
    assert (pointer.withdrawn, pointer.is_forced, pointer.reason) == ((2, 3), True, "rolled back from 2")
    assert publisher.next_version() == 4
    assert publish(publisher, adapted_drafter(9)) == 4
    assert publisher.rollback().version == 1  # not 2 or 3, which were withdrawn
    assert publisher.rollback(to=3).version == 3
    assert publisher.pointer().withdrawn == (2, 4)
    with pytest.raises(PublishedVersionError, match="Version 9"):
        publisher.rollback(to=9)
    publisher.rollback(to=0)
    with pytest.raises(InvalidInputError, match="no version before 0"):
        publisher.rollback()


def test_before_the_first_version_there_is_nothing_to_roll_back_to(tmp_path):
    with pytest.raises(InvalidInputError, match="nothing is published there yet"):
        Publisher(tmp_path).rollback()


def test_roll_back_repairs_a_damaged_pointer(tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter())
    (tmp_path / "latest.json").write_text("{")
    publisher.rollback(to=0)
    assert publisher.latest().version == 0


def test_a_damaged_version_is_not_rolled_back_to(tmp_path):
    publisher = Publisher(tmp_path)
    for seed in range(2):
        publish(publisher, adapted_drafter(seed))
    (tmp_path / "version-00000000" / "config.json").write_text("{}")
    with pytest.raises(PublishedVersionError, match="checksum"):
        publisher.rollback()
    assert publisher.pointer().version == 1


def test_old_versions_go_but_not_what_is_served_or_rolled_back_to(tmp_path):
    publisher = Publisher(tmp_path, keep_versions=2)
    for seed in range(6):
        publish(publisher, adapted_drafter(seed))
    assert publisher.numbers() == [0, 4, 5]
    publisher.rollback()
    publish(publisher, adapted_drafter(7))
    publish(publisher, adapted_drafter(8))
    assert publisher.numbers() == [0, 6, 7]
    publisher.rollback(to=0)
    assert publisher.prune(1) == [6]
    with pytest.raises(InvalidInputError, match="keep_versions"):
        Publisher(tmp_path, keep_versions=0)


def publish_until_killed(directory):
    publisher = Publisher(directory, keep_versions=3)
    while True:
        publish_constant(publisher, 0.25 + 0.001 * publisher.next_version())


def assert_whole(version):
    """Every weight of a version is the one number that belongs to it."""
    version.check_files()
    for tensor in weights_of(version).values():
        assert bool((tensor == torch.tensor(0.25 + 0.001 * version.version)).all())


def test_killed_at_random_instants_nobody_sees_half_a_version(tmp_path):
    rng = random.Random(0)
    versions, seen = PublishedVersions(tmp_path), set()
    publish_constant(Publisher(tmp_path), 0.25)  # however soon the next one is killed, there is one to be served
    for _ in range(8):
        with in_fork(publish_until_killed, tmp_path) as process:
            last = max(versions.numbers(), default=-1)
            while process.is_alive() and max(versions.numbers(), default=-1) <= last:
                pass
            kill_after(process, rng.uniform(0, 0.06))
        latest = versions.latest()
        assert_whole(latest)
        for number in versions.numbers():
            assert_whole(versions.get(number))
        assert not seen or latest.version >= max(seen)
        seen.add(latest.version)
    publish_constant(Publisher(tmp_path), 0.25 + 0.001 * Publisher(tmp_path).next_version())
    assert not list(tmp_path.glob(".version-*"))


def publish_on_a_full_disk(directory):
    size = (directory / "version-00000000" / "model.safetensors").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))
    with pytest.raises(PublishedVersionError, match="Free some space") as caught:
        publish(Publisher(directory), adapted_drafter(2))
    assert isinstance(caught.value.__cause__, OSError)  # what a trainer tries again after


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path):
    publisher = Publisher(tmp_path)
    publish(publisher, adapted_drafter(1))
    with in_fork(publish_on_a_full_disk, tmp_path) as process:
        process.join(600)
        assert process.exitcode == 0
    assert publisher.latest().version == 0
    assert not list(tmp_path.glob(".version-*"))
    assert publish(publisher, adapted_drafter(2)) == 1


def publish_without_privileges(directory):
    if os.geteuid() == 0:
        os.setegid(NOBODY)
        os.seteuid(NOBODY)
    for action in (lambda: publish(Publisher(directory), adapted_drafter(2)), Publisher(directory).rollback):
        with pytest.raises(PublishedVersionError, match="make it writable"):
            action()
    with pytest.raises(PublishedVersionError, match="make it writable"):
        Publisher(directory / "below")
    assert PublishedVersions(directory).latest().version == 0


def test_a_read_only_directory_is_reported_and_still_read():
    directory = Path(tempfile.mkdtemp())
    try:
        publish(Publisher(directory), adapted_drafter(1))
        directory.chmod(0o555)
        with in_fork(publish_without_privileges, directory) as process:
            process.join(600)
            assert process.exitcode == 0
    finally:
        directory.chmod(0o755)
        shutil.rmtree(directory)
