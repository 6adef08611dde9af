from __future__ import annotations

import pytest
from online_traffic import recorded

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.online.recorded_trajectory import MAX_DOMAIN_LENGTH, NO_DOMAIN, RecordedTrajectory


def test_a_prompt_has_one_hash_whatever_follows_it():
    first = RecordedTrajectory.from_lists([5, 6, 7], [8, 9])
    assert first.prompt_hash == RecordedTrajectory.from_lists([5, 6, 7], [10]).prompt_hash
    assert first.prompt_hash != RecordedTrajectory.from_lists([5, 6], [7, 8, 9]).prompt_hash
    assert 0 <= first.prompt_hash < 1


def test_hashes_are_spread_evenly():
    hashes = [recorded(seed).prompt_hash for seed in range(400)]
    below = sum(value < 0.125 for value in hashes)
    assert 29 <= below <= 71  # 50 expected, three standard deviations of 6.6 and a bit


def test_long_ones_are_cut_at_the_end_and_then_did_not_finish():
    whole = RecordedTrajectory.from_lists([1, 2, 3], [4, 5, 6, 7])
    assert whole.cut(7) is whole
    cut = whole.cut(5)
    assert cut is not None
    assert (cut.token_ids.tolist(), cut.finished, cut.prompt_length) == ([1, 2, 3, 4, 5], False, 3)
    assert whole.cut(4) is None  # one token of the response: nothing follows an anchor


def test_which_version_drafted_which_tokens():
    spans = ((3, 0, 2), (4, 2, 4))
    whole = RecordedTrajectory.from_lists([1, 2, 3], [4, 5, 6, 7], drafter_version=3, version_spans=spans)
    whole.check()
    cut = whole.cut(6)
    assert cut is not None and cut.version_spans == ((3, 0, 2), (4, 2, 3))
    cut.check()
    assert whole.cut(5).version_spans == ((3, 0, 2),)


@pytest.mark.parametrize("spans", [((3, 0, 3),), ((3, 1, 4),), ((3, 0, 2), (4, 3, 4)), ((3, 0, 4), (4, 4, 4))])
def test_versions_must_cover_the_response(spans):
    with pytest.raises(InvalidInputError, match="`version_spans` is .* for 4 response tokens"):
        RecordedTrajectory.from_lists([1], [4, 5, 6, 7], version_spans=spans).check()


def test_domains_are_never_empty_nor_endless():
    assert RecordedTrajectory.from_lists([1], [2]).domain == NO_DOMAIN
    assert len(RecordedTrajectory.from_lists([1], [2], domain="x" * 1000).domain) == MAX_DOMAIN_LENGTH


@pytest.mark.parametrize(("prompt", "response"), [([1, 2], []), ([], []), ([1], [-5])])
def test_what_no_target_can_have_said_is_refused(prompt, response):
    with pytest.raises(InvalidInputError, match=r"`prompt_length`|`token_ids`"):
        RecordedTrajectory.from_lists(prompt, response).check()


def test_the_row_for_the_collator():
    trajectory = RecordedTrajectory.from_lists([1, 2], [3, 4, 5], id=17)
    example = trajectory.example(domain_id=3, max_tokens=4)
    assert example["input_ids"].tolist() == [1, 2, 3, 4]
    assert (example["index"], example["prompt_length"], example["domain_id"]) == (17, 2, 3)
    assert not example["finished"]
    assert trajectory.example(0)["finished"]
