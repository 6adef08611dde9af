"""Verify lengths, and verdicts cut to them, against the package's own engine."""

from __future__ import annotations

import pytest
import torch
from tiny_models import BLOCK_SIZE, tiny_drafter

from adaflash_hf import DFlashDrafterModel, LengthHeadPolicy, RoundContext
from adaflash_hf.generation.acceptance import count_leading_matches
from adaflash_hf.modeling_length_head import LengthHeadModel
from adaflash_hf.serving.sglang_plugin.planning import LengthPlanner, cap_verdicts
from adaflash_hf.serving.sglang_plugin.settings import PluginSettings, VerifyMode


def drafter_with_head(spread: float = 8.0) -> DFlashDrafterModel:
    """A drafter whose head's estimates differ from block to block."""
    drafter = tiny_drafter(length_head_config={"head_type": "mean_linear", "bottleneck_size": 8})
    assert drafter.length_head is not None
    with torch.no_grad():
        drafter.length_head.down.weight.mul_(spread)
        drafter.length_head.out.weight.mul_(10 * spread)
    return drafter


def planner(
    head: LengthHeadModel | None,
    mode: str = VerifyMode.COMPACT,
    settings: PluginSettings | None = None,
    most: int | None = 48,
) -> LengthPlanner:
    return LengthPlanner(head, BLOCK_SIZE, mode, settings or PluginSettings(activation_concurrency=4), most)


@pytest.mark.parametrize("num_requests", [2, 4, 40])
@pytest.mark.parametrize(("scale", "minimum"), [(1.3, 2), (0.7, 1)])
def test_lengths_are_those_of_the_engines_policy(num_requests: int, scale: float, minimum: int) -> None:
    drafter = drafter_with_head()
    hidden_states = torch.randn(num_requests, BLOCK_SIZE, drafter.config.hidden_size)
    settings = PluginSettings(scale, minimum, activation_concurrency=4)
    lengths = planner(drafter.length_head, settings=settings).verify_lengths(hidden_states.flatten(0, 1))
    policy = LengthHeadPolicy(scale, minimum, activation_concurrency=4)
    context = RoundContext([BLOCK_SIZE] * num_requests, num_requests)
    assert lengths.tolist() == policy.choose(drafter, hidden_states, context)
    assert lengths.dtype == torch.int64
    if num_requests < 4:
        assert lengths.tolist() == [BLOCK_SIZE] * num_requests
    if num_requests == 40:
        assert len(set(lengths.tolist())) > 1, "a head that says the same of every block would show nothing"


def test_the_log_says_whether_the_head_is_on() -> None:
    head = drafter_with_head().length_head
    assert planner(head).describe() == (
        "AdaFlash length head: on, mode compact, length_scale 1.3, 2 to 4 rows, from 4 running requests of at most 48 "
        "on."
    )
    assert planner(head).is_active(4) and not planner(head).is_active(3)


@pytest.mark.parametrize(
    ("has_head", "mode", "most", "reason"),
    [
        (False, VerifyMode.COMPACT, 48, "the drafter has none"),
        (True, VerifyMode.STATIC, 48, "SGLANG_RAGGED_VERIFY_MODE is 'static'; set it to 'compact'"),
        (True, VerifyMode.CAP_ACCEPT, 3, r"from 4 requests on .* no more than 3 run at a time \(--max-running-req"),
    ],
)
def test_why_the_head_is_off(has_head: bool, mode: str, most: int, reason: str) -> None:
    drafter = drafter_with_head()
    lengths = planner(drafter.length_head if has_head else None, mode, most=most)
    assert lengths.describe().startswith("AdaFlash length head: off, whole blocks of 4 rows are verified: ")
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(lengths.describe())
    hidden_states = torch.randn(40 * BLOCK_SIZE, drafter.config.hidden_size)
    assert lengths.verify_lengths(hidden_states).tolist() == [BLOCK_SIZE] * 40


def test_verdicts_by_hand() -> None:
    candidates = torch.tensor([[10, 11, 12, 13]] * 4)
    accepted = torch.tensor([3, 3, 1, 0], dtype=torch.int32)
    bonus = torch.tensor([90, 91, 92, 93])
    kept, following = cap_verdicts(candidates, accepted, bonus, torch.tensor([4, 2, 2, 1]))
    # whole block; one draft kept and the second is the target's token after it; nothing to cut, twice
    assert kept.tolist() == [3, 1, 1, 0]
    assert following.tolist() == [90, 12, 92, 93]
    assert kept.dtype == torch.int32 and following.dtype == torch.int64


def test_capped_verdicts_are_those_of_the_engine_on_the_verified_rows() -> None:
    """Rows that were not verified hold anything at all."""
    generator = torch.Generator().manual_seed(0)
    num_requests, block_size = 400, 6
    # Two tokens only, so that every number of leading matches occurs.
    candidates = torch.randint(0, 2, (num_requests, block_size), generator=generator)
    target_ids = torch.randint(0, 2, (num_requests, block_size), generator=generator)
    lengths = torch.randint(1, block_size + 1, (num_requests,), generator=generator)
    computed = torch.arange(block_size) < lengths[:, None]
    seen = torch.where(computed, target_ids, torch.randint(0, 2, target_ids.shape, generator=generator))

    # What SGLang makes of whole blocks: leading matches, and the target's token after them.
    matches = (candidates[:, 1:] == seen[:, :-1]).long().cumprod(1).sum(1)
    bonus = seen.gather(1, matches[:, None])[:, 0]
    kept, following = cap_verdicts(candidates, matches, bonus, lengths)

    for index, length in enumerate(lengths.tolist()):
        drafts, choices = candidates[index, 1:length].tolist(), target_ids[index, :length].tolist()
        expected = count_leading_matches(drafts, choices)
        assert kept[index] == expected
        assert following[index] == choices[expected]


def test_capped_samples_have_the_targets_distribution() -> None:
    """At the last verified row the acceptance test and its replacement together are one draw of the target."""
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([0.5, 0.3, 0.2])
    draft, count = 1, 60_000
    # Acceptance of a point mass: keep with probability p(draft), else draw from what is left of p.
    uniforms = torch.rand(count, generator=generator)
    residual = p.clone()
    residual[draft] = 0
    replacements = torch.multinomial(residual, count, replacement=True, generator=generator)
    is_kept = uniforms < p[draft]
    candidates = torch.tensor([[0, draft]]).expand(count, 2)
    # A bonus drawn from a row that was never computed must not come through.
    bonus = torch.where(is_kept, torch.full((count,), 777), replacements)
    kept, following = cap_verdicts(candidates, is_kept.long(), bonus, torch.ones(count, dtype=torch.int64))
    assert kept.tolist() == [0] * count
    frequencies = torch.bincount(following, minlength=3) / count
    assert len(frequencies) == 3
    # Five standard deviations of a frequency near one half.
    assert (frequencies - p).abs().max() < 5 * (0.25 / count) ** 0.5
