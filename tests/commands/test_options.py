from __future__ import annotations

from adaflash_hf.commands.options import DraftProposal, LengthPolicy, drafting_kwargs


def test_options_that_are_not_given_stay_the_drafters_own():
    assert drafting_kwargs(None, None) == {}


def test_given_options_become_plain_strings():
    kwargs = drafting_kwargs(LengthPolicy.LENGTH_HEAD, DraftProposal.SAMPLE)
    assert kwargs == {"length_policy": "length_head", "draft_proposal": "sample"}
    assert {type(value) for value in kwargs.values()} == {str}
