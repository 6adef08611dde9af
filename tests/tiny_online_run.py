"""A tiny target and drafter on the disk, prompts, and settings of the processes of `adaflash online` with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from published_drafters import adapted_drafter
from stand_ins import SPECIAL_TOKENS, byte_tokenizer
from tiny_models import tiny_target

from adaflash_hf.online.online_arguments import OnlineTrainingArguments
from adaflash_hf.online.replay_buffer import BufferSettings
from adaflash_hf.online.run_settings import InferenceSettings, SideSettings, TrainerSettings
from adaflash_hf.training.prompts import read_prompt_file


VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
NUM_PROMPTS = 24


def save_models(directory: Path) -> Path:
    """Writes `target/`, `drafter/` and `prompts.jsonl`; an even number of prompts of two domains."""
    tiny_target("llama", vocab_size=VOCAB_SIZE).save_pretrained(directory / "target")
    byte_tokenizer().save_pretrained(directory / "target")
    adapted_drafter(vocab_size=VOCAB_SIZE).save_pretrained(directory / "drafter")
    with (directory / "prompts.jsonl").open("w") as file:
        for i in range(NUM_PROMPTS):
            file.write(json.dumps({"prompt": f"{i}+{7 * i}?", "domain": ("code", "math")[i % 2]}) + "\n")
    return directory


def side_settings(models: Path, place: Path, **fields: Any) -> SideSettings:
    """One side: `buffer` and `published` in `place`, a third of the prompts held out."""
    settings: dict[str, Any] = {
        "target": str(models / "target"),
        "drafter": str(models / "drafter"),
        "buffer": place / "buffer",
        "publish_dir": place / "published",
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "buffer_settings": BufferSettings(held_out_share=0.3),
    }
    return SideSettings(**{**settings, **fields})


def inference_settings(models: Path, place: Path, **fields: Any) -> InferenceSettings:
    """Serves the prompts once, eight new tokens each."""
    settings: dict[str, Any] = {
        "side": side_settings(models, place),
        "prompts": tuple(read_prompt_file(models / "prompts.jsonl")),
        "is_once": True,
        "concurrency": 4,
        "max_new_tokens": 8,
        "prepack": False,
        "run_id": "run",
    }
    return InferenceSettings(**{**settings, **fields})


def trainer_settings(models: Path, place: Path, **fields: Any) -> TrainerSettings:
    """Rounds of four trajectories that are published whatever they give."""
    arguments = OnlineTrainingArguments(
        round_size=4, epochs=1, min_held_out=1, tolerance=10.0, anchors_per_trajectory=4
    )
    settings: dict[str, Any] = {"side": side_settings(models, place), "arguments": arguments, "poll_s": 0.05}
    return TrainerSettings(**{**settings, **fields})
