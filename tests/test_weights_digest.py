from __future__ import annotations

import hashlib

from hub_server import running_hub
from tiny_models import tiny_drafter

from adaflash_hf import DFlashDrafterModel
from adaflash_hf.weights_digest import weights_sha256


def test_by_hand(tmp_path):
    assert weights_sha256(tmp_path) is None
    (tmp_path / "b.safetensors").write_bytes(b"two")
    (tmp_path / "a.safetensors").write_bytes(b"one")
    (tmp_path / "config.json").write_text("{}")
    parts = hashlib.sha256(b"one").digest() + hashlib.sha256(b"two").digest()
    assert weights_sha256(tmp_path) == hashlib.sha256(parts).hexdigest()


def test_of_a_hub_id_it_is_that_of_the_cached_files(tmp_path, monkeypatch):
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path / "drafter")
    with running_hub() as hub:
        hub.serve_this_process(monkeypatch, tmp_path / "cache")
        drafter.push_to_hub("org/drafter")
        assert weights_sha256("org/drafter") is None
        DFlashDrafterModel.from_pretrained("org/drafter")
    assert weights_sha256("org/drafter") == weights_sha256(tmp_path / "drafter") is not None
    assert weights_sha256("no/such/name") is None


def test_other_weights_of_the_same_shapes_differ(tmp_path):
    for seed in (1, 2):
        tiny_drafter(seed=seed).save_pretrained(tmp_path / str(seed))
    assert weights_sha256(tmp_path / "1") != weights_sha256(tmp_path / "2")
