"""The status of an adaptation that has done two rounds, as `RunSnapshots.take` returns it."""

from __future__ import annotations

from typing import Any


def example_snapshot() -> dict[str, Any]:
    """Version 2 is served, version 3 was refused by the server."""
    rounds = [
        {
            "round": number,
            "outcome": outcome,
            "version": number,
            "trajectories": {"math": 3, "code": 1},
            "held_out_before": {"all": 2.0, "math": 2.5},
            "held_out_after": {"all": 2.125, "math": 2.75},
            "loss": 1.5,
            "train_s": 30.0,
            "round_s": 125.0,
        }
        for number, outcome in ((1, "rejected"), (2, "published"))
    ]
    return {
        "time_s": 1100.0,
        "versions": {"available": [0, 2, 3], "served": 3, "withdrawn": [1], "reason": "published"},
        "buffer": {
            "rows": 40,
            "bytes": 5_000_000,
            "waiting": 7,
            "held_out": 5,
            "by_domain": {"code": 10, "math": 30},
            "appended": 55,
        },
        "acceptance": [
            {"domain": "math", "drafter_version": 2, "rounds": 8, "accepted": 6, "acceptance_length": 1.75}
        ],
        "acceptance_history": {
            "first_s": 1000.0,
            "piece_s": 50.0,
            "domains": {"math": [1.5, 1.75], "code": [2.0, None]},
        },
        "trainer": {
            "phase": "training",
            "updates_done": 3,
            "updates_total": 64,
            "remaining_s": 42.0,
            "rounds_done": 2,
            "updates": 128,
            "history": rounds,
        },
        "server": {
            "phase": "serving",
            "version": 2,
            "requests": {"length": 10, "stop": 20, "refused": 1},
            "active_requests": 8,
            "generated_tokens": 4096,
            "tok_per_s": 123.4,
            "reload": {
                "reloads": 2,
                "refused": {"3": "weights are broken"},
                "waiting_for": "",
                "prepare_s": 0.5,
                "pause_s": 0.002,
                "longest_pause_s": 0.004,
            },
            "recorder": {"received": 30, "written": 29, "last_error": ""},
        },
        "errors": ["server: the disk is full"],
    }
