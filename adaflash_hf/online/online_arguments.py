"""Settings of online training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..cpu_arithmetic import multiplies_natively
from ..errors import InvalidInputError
from ..training.head_labels import LENGTH_LABELS
from ..training.objectives import OBJECTIVES, DraftObjective


if TYPE_CHECKING:
    from .replay_buffer import BufferSettings


__all__ = ["OnlineTrainingArguments"]

PRECISIONS = ("auto", "float32", "bfloat16")
TRAINED_PARTS = ("both", "drafter", "length_head")


@dataclass(frozen=True)
class OnlineTrainingArguments:
    r"""
    Arguments of [`OnlineTrainer`]; the defaults are the paper's.

    Args:
        > A round

        round_size (`int`, defaults to 128):
            Trajectories that must have come in for a round, and that it trains on.
        epochs (`int`, defaults to 2):
            How often a round goes through its trajectories.
        batch_size (`int`, defaults to 1):
            Trajectories per forward.
        gradient_accumulation_steps (`int`, defaults to 2):
            Forwards per update.
        max_tokens (`int`, defaults to 2048):
            Longer trajectories are cut at the end.
        anchors_per_trajectory (`int`, defaults to 512):
            Blocks trained per trajectory and epoch, at most as many as it has tokens.
        balanced (`bool`, defaults to `False`):
            Whether each domain has an equal share of a round, with trajectories of earlier rounds where it has no
            new ones. Keeps what was learned of a domain that the traffic has left.

        > What is learned

        learning_rate (`float`, defaults to 3e-4), length_head_learning_rate (`float`, defaults to 2e-4):
            Of the drafter, and of its length head.
        learning_rate_backoff (`float`, defaults to 0.5):
            Factor on both rates after a round that was rejected or diverged. Five published rounds take it back, until
            the rates are what they were. 1 leaves them alone.
        trained_parts (`str`, defaults to `"both"`):
            `"both"`, `"drafter"` or `"length_head"`.
        lora_rank (`int`, *optional*):
            Train a LoRA adapter of this rank instead of all weights; what is published is merged.
        objective (`str`, defaults to `"mixture"`):
            See [`DraftObjective.named`]; `"forward_kl"` is online speculative decoding (OSD).
        hard_label_weight (`float`, defaults to 0.8), divergence (`str`, defaults to `"reverse_kl"`),
        clip (`str`, defaults to `"entry"`), clip_threshold (`float`, defaults to 0.01):
            See [`DraftObjective`].
        position_decay (`float`, *optional*):
            Slots after which a slot's weight has fallen to 1/e; by default all slots weigh alike.
        length_labels (`str`, defaults to `"hindsight"`):
            `"hindsight"` or `"truncated"`, what the length head learns from.
        length_scale (`float`, defaults to 1.3):
            Of the decoding that truncated labels imitate.
        weight_decay (`float`, defaults to 0.0), max_grad_norm (`float`, defaults to 1.0):
            Of the optimizer; a norm of 0 does not clip.
        use_muon (`bool`, defaults to `False`):
            Muon for the drafter's matrices, AdamW for the rest.

        > When it is published

        held_out (`int`, defaults to 64):
            Newest held-out trajectories that a round is judged on; 0 publishes every round unjudged.
        min_held_out (`int`, defaults to 8):
            Before there are as many, no round begins.
        eval_anchors_per_trajectory (`int`, defaults to 32):
            Blocks judged per held-out trajectory, the same before and after a round.
        tolerance (`float`, defaults to 0.0):
            How far the held-out acceptance length may fall for a round to be published.

        > How

        precision (`str`, defaults to `"auto"`):
            What matrices are multiplied in: `"float32"`, `"bfloat16"`, or `"auto"`, which takes the latter on CUDA and
            on processors that multiply it. Weights and optimizer are always float32.
        logits_memory_bytes (`int`, *optional*):
            What the logits of one chunk of rows and their temporaries may occupy.
        seed (`int`, defaults to 0):
            Of anchors and order.
    """

    round_size: int = 128
    epochs: int = 2
    batch_size: int = 1
    gradient_accumulation_steps: int = 2
    max_tokens: int = 2048
    anchors_per_trajectory: int = 512
    balanced: bool = False
    learning_rate: float = 3e-4
    length_head_learning_rate: float = 2e-4
    learning_rate_backoff: float = 0.5
    trained_parts: str = "both"
    lora_rank: int | None = None
    objective: str = "mixture"
    hard_label_weight: float = 0.8
    divergence: str = "reverse_kl"
    clip: str = "entry"
    clip_threshold: float = 0.01
    position_decay: float | None = None
    length_labels: str = "hindsight"
    length_scale: float = 1.3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    use_muon: bool = False
    held_out: int = 64
    min_held_out: int = 8
    eval_anchors_per_trajectory: int = 32
    tolerance: float = 0.0
    precision: str = "auto"
    logits_memory_bytes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "round_size",
            "epochs",
            "batch_size",
            "gradient_accumulation_steps",
            "max_tokens",
            "anchors_per_trajectory",
            "eval_anchors_per_trajectory",
        ):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        for name in ("learning_rate", "length_head_learning_rate"):
            if not getattr(self, name) > 0:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be above 0.")
        if not 0 < self.learning_rate_backoff <= 1:
            raise InvalidInputError(
                f"`learning_rate_backoff` is {self.learning_rate_backoff}; it must be above 0 and at most 1 (which "
                "leaves the rates as they are)."
            )
        for name in ("held_out", "min_held_out", "tolerance", "weight_decay", "max_grad_norm"):
            if getattr(self, name) < 0:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must not be negative.")
        for name, allowed in (
            ("objective", OBJECTIVES),
            ("trained_parts", TRAINED_PARTS),
            ("length_labels", LENGTH_LABELS),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in allowed:
                raise InvalidInputError(
                    f"`{name}` is {getattr(self, name)!r}; choose one of {', '.join(map(repr, allowed))}."
                )
        if self.held_out and self.min_held_out > self.held_out:
            raise InvalidInputError(
                f"`min_held_out` is {self.min_held_out}, but at most `held_out` = {self.held_out} are looked at; "
                "lower the first or raise the second."
            )
        if self.lora_rank is not None and self.trained_parts == "length_head":
            raise InvalidInputError(
                "`lora_rank` is given, but `trained_parts` is 'length_head'; leave one of them out."
            )
        _ = self.draft_objective  # checks the rest

    @property
    def draft_objective(self) -> DraftObjective:
        """The loss these arguments describe."""
        return DraftObjective.named(
            self.objective,
            hard_label_weight=self.hard_label_weight,
            divergence=self.divergence,
            clip=self.clip,
            clip_threshold=self.clip_threshold,
        )

    @property
    def is_guarded(self) -> bool:
        """Whether a round is judged before it is published."""
        return self.held_out > 0

    def autocast_dtype(self, device: torch.device) -> torch.dtype | None:
        """What matrices are multiplied in on a device; None for float32."""
        is_fast = device.type == "cuda" or (device.type == "cpu" and multiplies_natively(torch.bfloat16))
        wants_bfloat16 = self.precision == "bfloat16" or (self.precision == "auto" and is_fast)
        return torch.bfloat16 if wants_bfloat16 else None

    def to_dict(self) -> dict[str, Any]:
        """All of them."""
        return asdict(self)

    def check_buffer(self, settings: BufferSettings) -> None:
        """
        Refuse a buffer that no round can be made from.

        Args:
            settings (`BufferSettings`):
                What it was made with.
        """
        if 2 * self.round_size > settings.max_rows:
            raise InvalidInputError(
                f"`round_size` is {self.round_size}, but the buffer keeps `max_rows` = {settings.max_rows}; it must "
                "keep at least twice a round."
            )
        if self.is_guarded and settings.held_out_share == 0:
            raise InvalidInputError(
                f"`held_out` is {self.held_out}, but the buffer holds nothing out (`held_out_share` is 0); make it "
                "with another share, or set `held_out` to 0 to publish every round unjudged."
            )
