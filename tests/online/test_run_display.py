from __future__ import annotations

from rich.console import Console
from snapshots import example_snapshot

from adaflash_hf.online.run_display import build_page, describe_in_a_line, newest_acceptance
from adaflash_hf.online.run_snapshot import RunSnapshots


def shown(snapshot):
    console = Console(width=140)
    with console.capture() as capture:
        console.print(build_page(snapshot))
    return capture.get()


def test_the_page_shows_versions_acceptance_rounds_and_errors():
    page = shown(example_snapshot())
    for text in (
        "3 (published), withdrawn [1]",
        "version 2, serving, 8 running, 30 answered, 123.4 tok/s",
        "paused 2.0 ms, longest 4.0 ms",
        "version 3: weights are broken",
        "40 trajectories, 7 new, 5 held out, 5.0 MB",
        "training, update 3 of 64, about 42 s left of the round",
        "2.000 -> 2.125",
        "1 code, 3 math",
        "server: the disk is full",
    ):
        assert text in page
    math = next(line for line in page.splitlines() if "math" in line and "1.75" in line)
    assert math.index("1.50") < math.index("1.75")


def test_the_newest_acceptance_is_that_of_the_last_piece_with_traffic():
    assert newest_acceptance(example_snapshot()) == {"math": 1.75, "code": 2.0}


def test_a_line_says_the_same_in_short():
    line = describe_in_a_line(example_snapshot())
    assert line.startswith("version 2  waiting 7 of 40  trainer: training, update 3 of 64")
    assert line.endswith("tau math 1.75  code 2.00")


def test_the_rest_of_a_wait_is_shown_if_it_is_known():
    snapshot = example_snapshot()
    snapshot["trainer"] = {"phase": "waiting", "waiting_for": "3 of 9 new trajectories", "remaining_s": 240.0}
    assert "trainer: waiting for 3 of 9 new trajectories, about 4 min  server" in describe_in_a_line(snapshot)
    del snapshot["trainer"]["remaining_s"]
    assert "trainer: waiting for 3 of 9 new trajectories  server" in describe_in_a_line(snapshot)


def test_nothing_yet_can_be_shown_too(tmp_path):
    snapshot = RunSnapshots(tmp_path, tmp_path / "buffer").take()
    assert "nothing yet" in shown(snapshot)
    assert describe_in_a_line(snapshot) == "version -  waiting 0 of 0  trainer: none  server: none  tau -"
