"""Arguments of a drafter's training run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments
from transformers.utils import is_accelerate_available

from ..error_text import install_hint
from ..errors import InvalidInputError, MissingDependencyError
from .head_labels import LENGTH_LABELS
from .objectives import OBJECTIVES, DraftObjective


__all__ = ["DrafterTrainingArguments"]

TRAIN_ONLY = ("drafter", "length_head", "confidence_head")
ATTENTIONS = ("auto", "blocks", "sdpa", "eager", "flex_attention")
TEACHERS = ("auto", "none", "top_k", "full")


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    r"""
    Arguments of [`DrafterTrainer`], besides those of [`~transformers.TrainingArguments`].

    Defaults unlike the parent's: `learning_rate` 3e-4, `adam_beta2` 0.95, `per_device_train_batch_size` and
    `per_device_eval_batch_size` 1, `logging_steps` 10, `remove_unused_columns` false, `label_names` `["labels"]`,
    `ddp_find_unused_parameters` false.

    Args:
        train_only (`str`, *optional*):
            `"drafter"` leaves the length head alone, `"length_head"` trains the head on a frozen drafter, and
            `"confidence_head"` a separate [`ConfidenceHeadModel`]. By default drafter and length head are trained; the
            head's gradient never reaches the drafter.

        > What is learned

        objective (`str`, defaults to `"mixture"`):
            `"mixture"`, `"cross_entropy"`, `"reverse_kl"`, `"forward_kl"` or `"acceptance"`, see
            [`DraftObjective.named`].
        hard_label_weight (`float`, defaults to 0.8):
            Share of the hard label in the mixture.
        divergence (`str`, defaults to `"reverse_kl"`):
            The other part of the mixture: `"reverse_kl"`, `"forward_kl"` or `"acceptance"`.
        clip (`str`, defaults to `"entry"`):
            What of the divergence is clipped: `"entry"`, `"sum"` or `"none"`.
        clip_threshold (`float`, defaults to 0.01):
            In nats.
        position_decay (`float`, *optional*):
            Slots after which a slot's weight has fallen to 1/e; by default all slots weigh alike.
        teacher (`str`, defaults to `"auto"`):
            Where the target's distribution comes from: `"top_k"` stored with the trajectories, `"full"` computed by
            the target on the fly, `"none"`. Auto takes what the objective needs, stored if there is one.
        vocabulary_size (`int`, *optional*):
            Train on a softmax over this many of the tokens that occur; by default over all.
        draft_vocabulary (`bool`, defaults to `False`):
            Make the vocabulary of training the drafter's draft vocabulary: decoding then multiplies the LM head for
            these tokens alone, and never drafts others.
        length_labels (`str`, defaults to `"hindsight"`):
            What the length head learns: the accepted share of the full block (`"hindsight"`), or of as much of it as
            decoding by the head itself would have verified (`"truncated"`).
        length_scale (`float`, defaults to 1.3):
            Of that decoding; nothing else here depends on it.

        > How much of a trajectory is used

        anchors_per_trajectory (`int`, defaults to 512):
            Blocks trained per trajectory and epoch, at most as many as it has tokens.
        eval_anchors_per_trajectory (`int`, defaults to 32):
            The same for evaluation, where the anchors stay the same from one to the next.

        > Optimization

        use_muon (`bool`, defaults to `False`):
            Muon for the drafter's matrices, AdamW for the rest.
        vector_learning_rate (`float`, *optional*):
            Learning rate of what is not a matrix; by default `learning_rate`.
        length_head_learning_rate (`float`, defaults to 2e-4):
            Learning rate of the length head, or of the confidence head.
        logits_memory_bytes (`int`, *optional*):
            What the logits of one chunk of rows and their temporaries may occupy; see [`default_logits_memory`].
        drafter_attention (`str`, defaults to `"auto"`):
            `"blocks"`, `"sdpa"`, `"eager"` or `"flex_attention"`, in training and evaluation; afterwards the drafter
            is as it was loaded. Auto takes FlexAttention on CUDA where a trajectory has many rows, else blocks, see
            [`choose_attention`].
    """

    learning_rate: float = field(default=3e-4, metadata={"help": "Learning rate of the drafter."})
    adam_beta2: float = field(default=0.95, metadata={"help": "Beta2 of AdamW."})
    per_device_train_batch_size: int = field(default=1, metadata={"help": "Trajectories per step and device."})
    per_device_eval_batch_size: int = field(default=1, metadata={"help": "Held-out trajectories per step and device."})
    logging_steps: float = field(default=10, metadata={"help": "Steps between two log entries."})
    remove_unused_columns: bool | None = field(default=False, metadata={"help": "The collator needs all columns."})
    label_names: list[str] | None = field(default_factory=lambda: ["labels"], metadata={"help": "Keys of labels."})

    # DDP's search starts from the drafter's output, so it would take the length head, applied after it, for unused.
    ddp_find_unused_parameters: bool | None = field(default=False, metadata={"help": "All of them are used."})

    train_only: str | None = field(default=None, metadata={"help": f"{' or '.join(TRAIN_ONLY)}."})
    objective: str = field(default="mixture", metadata={"help": f"One of {', '.join(OBJECTIVES)}."})
    hard_label_weight: float = field(default=0.8, metadata={"help": "Share of the hard label in the mixture."})
    divergence: str = field(default="reverse_kl", metadata={"help": "The mixture's other part."})
    clip: str = field(default="entry", metadata={"help": "What is clipped: `entry`, `sum` or `none`."})
    clip_threshold: float = field(default=0.01, metadata={"help": "Clip above this many nats."})
    position_decay: float | None = field(default=None, metadata={"help": "Slots to a weight of 1/e; none by default."})
    teacher: str = field(default="auto", metadata={"help": "`top_k`, `full`, `none` or `auto`."})
    vocabulary_size: int | None = field(default=None, metadata={"help": "Tokens in the training softmax."})
    draft_vocabulary: bool = field(default=False, metadata={"help": "Draft from the tokens of training alone."})
    length_labels: str = field(default="hindsight", metadata={"help": f"One of {', '.join(LENGTH_LABELS)}."})
    length_scale: float = field(default=1.3, metadata={"help": "Of the decoding that truncated labels imitate."})
    anchors_per_trajectory: int = field(default=512, metadata={"help": "Blocks per trajectory and epoch."})
    eval_anchors_per_trajectory: int = field(default=32, metadata={"help": "Blocks per held-out trajectory."})
    use_muon: bool = field(default=False, metadata={"help": "Muon for matrices, AdamW for the rest."})
    vector_learning_rate: float | None = field(default=None, metadata={"help": "Learning rate of non-matrices."})
    length_head_learning_rate: float = field(default=2e-4, metadata={"help": "Learning rate of the length head."})
    logits_memory_bytes: int | None = field(default=None, metadata={"help": "Memory of one chunk of logits."})
    drafter_attention: str = field(default="auto", metadata={"help": f"One of {', '.join(ATTENTIONS)}."})

    def __post_init__(self, *args: Any, **kwargs: Any) -> None:
        if not is_accelerate_available():
            raise MissingDependencyError(
                f"Training needs the package accelerate, which is not installed; run: {install_hint('train')}"
            )
        super().__post_init__(*args, **kwargs)
        for name, allowed in (
            ("train_only", (None, *TRAIN_ONLY)),
            ("teacher", TEACHERS),
            ("length_labels", LENGTH_LABELS),
            ("drafter_attention", ATTENTIONS),
        ):
            if getattr(self, name) not in allowed:
                choices = ", ".join(repr(value) for value in allowed if value is not None)
                raise InvalidInputError(f"`{name}` is {getattr(self, name)!r}; choose one of {choices}.")
        for name in ("anchors_per_trajectory", "eval_anchors_per_trajectory"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"`{name}` is {getattr(self, name)}; it must be at least 1.")
        rates = ("learning_rate", "vector_learning_rate", "length_head_learning_rate")
        for name in (*rates, "num_train_epochs", "position_decay"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidInputError(f"`{name}` is {value}; it must be above 0.")
        if self.length_scale <= 0:
            raise InvalidInputError(f"`length_scale` is {self.length_scale}; it must be above 0 (1.3 is usual).")
        if self.teacher == "none" and self.draft_objective.needs_teacher and self.trains_drafter:
            raise InvalidInputError(
                f"`teacher` is 'none', but `objective` {self.objective!r} compares with the target's distribution; "
                "choose 'top_k' or 'full', or the objective 'cross_entropy'."
            )

    @property
    def trains_drafter(self) -> bool:
        """Whether the drafter itself learns, not only a head on it."""
        return self.train_only in (None, "drafter")

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
