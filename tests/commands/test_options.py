from __future__ import annotations

import logging

import pytest

from adaflash_hf.cli import main
from adaflash_hf.commands.options import DraftProposal, LengthPolicy, drafting_kwargs


def test_costs_are_weighed_unless_something_else_is_asked_for():
    assert drafting_kwargs(None, None) == {"length_policy": "cost_aware"}
    assert drafting_kwargs(LengthPolicy.FIXED, None) == {"length_policy": "fixed"}


def test_measuring_costs_is_said_once():
    calibration = logging.getLogger("adaflash_hf.generation.cost_calibration")
    for _ in range(2):
        drafting_kwargs(None, None)
    assert len(calibration.handlers) == 1
    assert calibration.isEnabledFor(logging.INFO)


def test_given_options_become_plain_strings():
    kwargs = drafting_kwargs(LengthPolicy.LENGTH_HEAD, DraftProposal.SAMPLE)
    assert kwargs == {"length_policy": "length_head", "draft_proposal": "sample"}
    assert {type(value) for value in kwargs.values()} == {str}


@pytest.mark.parametrize("command", [["card"], ["online", "push"], ["train"]])
def test_repositories_are_private_by_the_same_option(command, capsys):
    assert main([*command, "--help"]) == 0
    assert "--private / --public Of a repository that is new. [default: public]" in " ".join(
        capsys.readouterr().out.split()
    )
