"""The runs that led to a drafter: each that goes on from another keeps the records of those before it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .run_records import CHECKPOINTS, read_run_record
from .saving import ADAPTER_DIRECTORY


__all__ = ["earlier_stages", "stages_of"]

# What a record says of the runs before its own.
EARLIER = ("previous", "previous_omitted")
# Some twenty-five records: a run goes on even from one that a loop has made from itself a thousand times.
_MOST_BYTES = 1 << 18


def earlier_stages(init: str | Path, out: str | Path) -> dict[str, Any]:
    """
    What the record of a run says about the runs before it.

    Args:
        init (`str` or `Path`):
            The drafter that the run goes on from. One on the Hub has no record: those name places on a machine.
        out (`str` or `Path`):
            Directory of the run.

    Returns:
        `dict[str, Any]`: `previous`, their records, the oldest first; empty if there are none. `previous_omitted`, how
        many more there were: the oldest are left out where all would make the file large.
    """
    record = _record_behind(Path(init).resolve())
    if record is None:
        return dict(zip(EARLIER, ([], 0), strict=True))
    stages = stages_of(record)
    if Path(init).resolve() == Path(out).resolve() and "outcome" not in record:
        # Begun in the drafter's own directory and killed: its weights are still those that the run began with.
        stages.pop()
    omitted = record.get("previous_omitted", 0)
    while stages and len(json.dumps(stages)) > _MOST_BYTES:
        stages.pop(0)
        omitted += 1
    return dict(zip(EARLIER, (stages, omitted), strict=True))


def stages_of(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """
    Records of the runs that led to a drafter, the oldest first and its own last, each without those before it.

    Args:
        record (`Mapping[str, Any]`):
            From [`read_run_record`]. It has a list of those before it, or, from an earlier version of this package,
            the last of them, which has the one before that.
    """
    previous = record.get("previous") or []
    before = stages_of(previous) if isinstance(previous, Mapping) else list(previous)
    return [*before, {name: value for name, value in record.items() if name not in EARLIER}]


def _record_behind(drafter: Path) -> dict[str, Any] | None:
    """Of the run that made these weights; checkpoints and adapters lie in its directory."""
    record = read_run_record(drafter)
    if record is None and drafter.parent.name == CHECKPOINTS:
        record = read_run_record(drafter.parent.parent)
        return None if record is None else {**record, "checkpoint": drafter.name}
    if record is None and drafter.name == ADAPTER_DIRECTORY:
        return read_run_record(drafter.parent)
    return record
