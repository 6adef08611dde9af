"""How long stored prompts and responses are, by domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .trajectories import damaged_shard, find_trajectory_shards


__all__ = ["LengthStatistics", "length_statistics"]

ALL_DOMAINS = "all"


@dataclass(frozen=True)
class LengthStatistics:
    """
    Lengths of the trajectories of one domain, in tokens.

    Attributes:
        domain: Its name; `"all"` for everything together.
        trajectories: How many there are.
        finished_share: Share of the responses that ended by themselves.
        prompt_tokens_mean: Mean prompt.
        response_tokens: All response tokens.
        response_tokens_mean: Mean response.
        response_tokens_median: Median response.
        response_tokens_p90: Nine in ten responses are at most this long.
    """

    domain: str
    trajectories: int
    finished_share: float
    prompt_tokens_mean: float
    response_tokens: int
    response_tokens_mean: float
    response_tokens_median: float
    response_tokens_p90: float


def length_statistics(directories: Sequence[str | Path]) -> list[LengthStatistics]:
    """
    Statistics of each domain, and of all of them last if there are several.

    Args:
        directories (`Sequence[str or Path]`):
            What `adaflash trajectories` wrote.

    Raises:
        InvalidInputError: a file is damaged.
    """
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    columns = ["prompt_ids", "response_ids", "domain", "finished"]
    tables = []
    for path in (path for directory in directories for path in find_trajectory_shards(directory)):
        try:
            tables.append(pq.read_table(path, columns=columns))
        except (OSError, ValueError) as error:
            raise damaged_shard(path, error) from error
    prompts = np.concatenate([pc.list_value_length(table["prompt_ids"]).to_numpy() for table in tables])
    responses = np.concatenate([pc.list_value_length(table["response_ids"]).to_numpy() for table in tables])
    finished = np.concatenate([table["finished"].to_numpy() for table in tables])
    domains = np.array([domain for table in tables for domain in table["domain"].to_pylist()])
    rows = [
        _statistics(name, prompts[domains == name], responses[domains == name], finished[domains == name])
        for name in sorted(set(domains.tolist()))
    ]
    return rows if len(rows) == 1 else [*rows, _statistics(ALL_DOMAINS, prompts, responses, finished)]


def _statistics(domain: str, prompts: np.ndarray, responses: np.ndarray, finished: np.ndarray) -> LengthStatistics:
    return LengthStatistics(
        domain=domain,
        trajectories=len(responses),
        finished_share=float(finished.mean()),
        prompt_tokens_mean=float(prompts.mean()),
        response_tokens=int(responses.sum()),
        response_tokens_mean=float(responses.mean()),
        response_tokens_median=float(np.median(responses)),
        response_tokens_p90=float(np.quantile(responses, 0.9, method="higher")),
    )
