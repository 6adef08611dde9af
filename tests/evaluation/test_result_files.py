from __future__ import annotations

import json

from adaflash_hf.evaluation.result_files import markdown_table, mean_and_spread, write_results


def test_a_table_by_hand():
    table = markdown_table(["", "tau", "seeds"], [["mixture", 2.34567, 3], ["nothing", None, "0"]])
    assert table.splitlines() == [
        "|  | tau | seeds |",
        "| :-- | --: | --: |",
        "| mixture | 2.346 | 3 |",
        "| nothing | - | 0 |",
    ]


def test_mean_and_spread_by_hand():
    # Deviations -1, 0, 1: variance 2 / (3 - 1).
    assert mean_and_spread([1.0, 2.0, 3.0]) == "2.000 ± 1.000"
    assert mean_and_spread([1.25], digits=1) == "1.2"
    assert mean_and_spread([]) == "-"


def test_both_files_are_written_from_the_same_data(tmp_path):
    path = tmp_path / "deep" / "results.v2"
    write_results(path, {"tau": 2.5}, "Title", ["First.", "| a |"])
    assert json.loads((tmp_path / "deep" / "results.v2.json").read_text()) == {"tau": 2.5}
    assert (tmp_path / "deep" / "results.v2.md").read_text() == "# Title\n\nFirst.\n\n| a |\n"
    assert sorted(file.name for file in path.parent.iterdir()) == ["results.v2.json", "results.v2.md"]
