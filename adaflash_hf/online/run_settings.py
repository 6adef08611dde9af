"""What the two processes of `adaflash online` are told; plain values, which travel to a new process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import InvalidInputError
from ..training.prompts import Prompt
from .online_arguments import OnlineTrainingArguments
from .replay_buffer import BufferSettings


__all__ = ["InferenceSettings", "SideSettings", "TrainerSettings"]


@dataclass(frozen=True)
class SideSettings:
    """
    What both sides need.

    Attributes:
        target: Hub id or directory of the target.
        drafter: Hub id or directory of the drafter that adaptation begins with.
        buffer: File of the replay buffer.
        publish_dir: Directory of published versions.
        dtype: What the target computes in, see `load_target`.
        device: Where this side runs; by default where `load_target` puts a model.
        threads: Threads of this side on a CPU; by default torch's own number.
        buffer_settings: What a new buffer is made with.
    """

    target: str
    drafter: str
    buffer: Path
    publish_dir: Path
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    buffer_settings: BufferSettings = field(default_factory=BufferSettings)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise InvalidInputError(f"`threads` is {self.threads}; it must be at least 1.")


@dataclass(frozen=True)
class InferenceSettings:
    """
    Settings of the inference side.

    Attributes:
        side: What both sides need.
        prompts: What to answer, in this order, see `read_prompt_file`.
        is_once: Whether to end after the last prompt instead of beginning again.
        concurrency: Requests in flight.
        max_new_tokens: Longest response.
        max_prompt_tokens: Longer prompts are left out.
        temperature: 0 decodes greedily.
        seed: Of sampled requests.
        length_policy: As in `generate()`.
        prepack: Whether to rearrange weights for blocks of rows on a CPU.
        run_id: Whose position in the prompts to go on from, if this process takes the place of one that died.
    """

    side: SideSettings
    prompts: tuple[Prompt, ...]
    is_once: bool = False
    concurrency: int = 8
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    temperature: float = 0.0
    seed: int = 0
    length_policy: str | None = None
    prepack: bool = True
    run_id: str = ""

    def __post_init__(self) -> None:
        for name in ("concurrency", "max_new_tokens", "max_prompt_tokens"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        if not self.prompts:
            raise InvalidInputError("`prompts` is empty; give what to answer.")
        if self.temperature < 0:
            raise InvalidInputError(f"`temperature` is {self.temperature}; it must not be negative.")

    @property
    def prompts_id(self) -> str:
        """A name that other prompts, or another order of them, would not have."""
        return hashlib.blake2b(repr(self.prompts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class TrainerSettings:
    """
    Settings of the trainer's side.

    Attributes:
        side: What both sides need.
        arguments: How to train.
        max_rounds: End after this many rounds.
        keep_versions: Newest versions that stay.
        poll_s: Seconds between two looks at the buffer.
    """

    side: SideSettings
    arguments: OnlineTrainingArguments = field(default_factory=OnlineTrainingArguments)
    max_rounds: int | None = None
    keep_versions: int = 5
    poll_s: float = 1.0
