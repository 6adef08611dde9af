"""Tables of domain shifts, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from adaflash_hf.evaluation.domain_shift import DomainShiftSettings, FinishedShiftRun
from adaflash_hf.evaluation.domain_shift_report import phase_outcomes, shift_sections
from adaflash_hf.evaluation.domain_traffic import TrafficShape


SETTINGS = DomainShiftSettings("tiny", TrafficShape("maths", ("code", "maths"), 1, 4, 4, 2), 16)


def entry(number, phase, domain, maths, code, served=2.0, **training):
    held_out = {
        name: {"acceptance_length": tau, "head_rows": 4.0, "head_error_tokens": 0.5, "head_acceptance_length": tau / 2}
        for name, tau in (("maths", maths), ("code", code))
    }
    measured = {"requests": 4, "acceptance_length": served, "mean_verify_length": 8.0, "different_responses": 0}
    measured["tok_per_s"] = 10.0 * number
    return {
        "number": number, "phase": phase, "domain": domain, "version": number, "served": measured,
        "training": training, "held_out": held_out,
    }  # fmt: skip


def run(method, seed, taus):
    (home, after_code, after_maths) = taus
    rounds = [
        entry(0, -1, "maths", *home),
        entry(1, 0, "code", *after_code, served=1.5, outcome="published"),
        entry(2, 1, "maths", *after_maths, served=2.5, outcome="rejected"),
    ]
    return FinishedShiftRun(method, seed, {}, {}, rounds, 1.0)


def reference(domain, tau):
    rounds = [{"number": 0, "phase": -1, "domain": domain, "held_out": {domain: {"acceptance_length": tau}}}]
    return FinishedShiftRun(f"reference-{domain}", 0, {}, {}, rounds, 1.0)


RUNS = [
    run("adaflash", 0, [(3.0, 1.5), (2.7, 1.8), (2.9, 1.7)]),
    run("adaflash", 1, [(3.0, 1.5), (2.4, 2.0), (2.9, 1.7)]),
    run("static", 0, [(3.0, 1.5)] * 3),
]


def test_what_was_recovered_and_what_was_lost():
    code, maths = phase_outcomes(RUNS[0], {"code": 2.0})
    assert (code.domain, code.before, code.after, code.start, code.reference) == ("code", 1.5, 1.8, 1.5, 2.0)
    assert code.recovered == pytest.approx(0.6)
    assert (code.left, code.left_before, code.left_after) == ("maths", 3.0, 2.7)
    assert code.change_of_left == pytest.approx(-0.1)
    assert (maths.domain, maths.before, maths.after, maths.start) == ("maths", 2.7, 2.9, 3.0)
    assert (maths.reference, maths.recovered, maths.left, maths.left_before) == (None, None, "code", 1.8)
    # A gap this small would be divided by for nothing.
    assert phase_outcomes(RUNS[0], {"code": 1.54})[0].recovered is None


def test_the_tables():
    text = "\n".join(shift_sections(RUNS, [reference("code", 2.0)], SETTINGS))
    row = "| 1: code | adaflash | 1.500 ± 0.000 | 1.900 ± 0.141 | 1.500 | 2.000 | 0.80 ± 0.28 | maths |"
    assert f"{row} 3.000 ± 0.000 | 2.550 ± 0.212 | -15.0 ± 7.1 % | 2 |" in text
    assert text.index("| 1: code | static | 1.500 | 1.500 | 1.500 | 2.000 | 0.00 |") < text.index(row)
    assert "| 2: maths | static | 3.000 | 3.000 | 3.000 | - | - | code | 1.500 | 1.500 | 0.0 % | 1 |" in text
    assert "| 1: code | static | 1.500 | 1.500 | 8.00 | 8.00 | 10.0 | 10.0 |" in text
    assert "tokens/s" not in "".join(shift_sections(RUNS, [], replace(SETTINGS, is_live=False)))
    assert "| adaflash | 1.500 ± 0.000 | 1.200 ± 0.000 |" in text
    assert "| 1: code | static | 0.500 | 0.500 | 4.00 | 0.750 | 0.188 |" in text
    assert "not published: 3;" in text and "serving refused: 0" in text and "decoding: 0 of 36." in text
    assert "1 rounds each of 4 trajectories" in text and "decoded by the engine, 16 at a time" in text
    assert "Seeds: 0, 1" in text
