"""Multi-token prediction by a target's own heads, as transformers' `use_mtp` does it: which targets have them, and a
benchmark's method."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import transformers

from ..embedded_target import EMBEDDED_TARGET_NAME, without_progress_bars
from ..error_text import first_line
from ..errors import InvalidInputError
from ..generation.prepacking import has_prepacked_layers, prepack_linear_layers
from ..generation.statistics import GenerationStats
from ..hub_connection import hub_or_cache
from .bench_method_names import TRANSFORMERS_MTP
from .bench_methods import BenchModels, GenerateMethod, stats_of_steps
from .bench_results import MethodRun
from .bench_timing import StepTimer


if TYPE_CHECKING:
    from transformers import PreTrainedModel


__all__ = ["MtpMethod", "check_mtp_heads"]

_NEXT_STEP = f"Pass a --target with such heads, or leave {TRANSFORMERS_MTP} out."


def check_mtp_heads(target: str) -> None:
    """
    Refuse a target without them before it is loaded.

    Args:
        target (`str`):
            Value of `--target`.
    """
    if target == EMBEDDED_TARGET_NAME:
        raise _without_heads(target)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        with hub_or_cache(target):
            config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError, StrictDataclassError) as error:
        raise InvalidInputError(
            f"`--target` is {target!r} and its configuration cannot be read ({first_line(error)}). Pass a Hub id or a "
            "directory with a config.json."
        ) from error
    if not _num_heads(config):
        raise _without_heads(target)


class MtpMethod(GenerateMethod):
    """
    `generate(use_mtp=True)`.

    transformers reads the heads anew from the disk in every call, which is not decoding: here they are read once.

    Args:
        name (`str`):
            Name of the method.
        models (`BenchModels`):
            Models; the target must have been loaded by name, or from a directory that is still there.
    """

    def __init__(self, name: str, models: BenchModels) -> None:
        super().__init__(name, models, {"use_mtp": True}, single=True)
        self._heads: Any = None

    def prepare(self, concurrency: int) -> None:
        if self._heads is None:
            self._heads = _load_heads(self._models.target)

    def _run(self, prompts: Sequence[list[int]], concurrency: int, max_new_tokens: int) -> MethodRun:
        self.prepare(concurrency)
        with _loaded(self._heads):
            return super()._run(prompts, concurrency, max_new_tokens)

    def _statistics(self, timer: StepTimer) -> GenerationStats:
        """Every head drafts one token in every round; what a round commits is a draft less than its tokens."""
        stats = stats_of_steps(timer.step_tokens)
        stats.count_rounds((1 + self._heads.num_mtp_layers, count - 1) for count in timer.step_tokens[1:])
        return stats


def _num_heads(config: Any) -> int:
    return getattr(config.get_text_config(), "num_mtp_layers", None) or 0


def _without_heads(target: str) -> InvalidInputError:
    return InvalidInputError(
        f"`--target` is {target!r}, whose configuration has no `num_mtp_layers`, so transformers' `use_mtp` finds no "
        f"heads in it. {_NEXT_STEP}"
    )


def _load_heads(target: PreTrainedModel) -> Any:
    from safetensors import SafetensorError
    from transformers.modeling_layers import MtpModel

    if not _num_heads(target.config):
        raise _without_heads(target.name_or_path)
    device = next(target.get_decoder().layers[-1].parameters()).device
    try:
        with without_progress_bars():
            heads = MtpModel.from_pretrained(target, device_map={"": device}).eval()
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        reason, *_ = first_line(error).split(": [")  # without the names of all weights
        raise InvalidInputError(
            f"`--target` is {target.name_or_path!r}, whose heads for multi-token prediction transformers "
            f"{transformers.__version__} cannot load ({reason}). {_NEXT_STEP}"
        ) from error
    if has_prepacked_layers(target):
        # As drafters are. Not all of it: it shares the target's embedding and head, which may not be rounded.
        prepack_linear_layers(heads.layers, allow_rounding=True)
    return heads


@contextmanager
def _loaded(heads: Any) -> Iterator[None]:
    """
    Lets transformers (5.19 to 5.24) find heads that are loaded. Can go when its `MTPCandidateGenerator` keeps them or
    takes them.
    """
    from transformers.modeling_layers import MtpModel

    original = MtpModel.__dict__["from_pretrained"]
    MtpModel.from_pretrained = staticmethod(lambda *args, **kwargs: heads)
    try:
        yield
    finally:
        MtpModel.from_pretrained = original
