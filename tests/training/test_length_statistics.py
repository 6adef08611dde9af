from __future__ import annotations

import pytest
from tiny_models import tiny_target
from tiny_trajectories import make_trajectories, random_prompts

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.training.length_statistics import length_statistics


def test_a_damaged_file_is_named(tmp_path):
    make_trajectories(tmp_path, tiny_target("llama"))
    path = next(tmp_path.glob("*.parquet"))
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(InvalidInputError, match=f"{path.name} cannot be read .* remove it and run"):
        length_statistics([tmp_path])


def test_lengths_by_domain_and_together(tmp_path):
    target = tiny_target("llama")
    make_trajectories(tmp_path, target)
    code, math, everything = length_statistics([tmp_path])
    prompts, domains = random_prompts(12)
    assert (code.domain, math.domain, everything.domain) == ("code", "math", "all")
    assert (code.trajectories, math.trajectories, everything.trajectories) == (6, 6, 12)
    mean = sum(len(p) for p, d in zip(prompts, domains, strict=True) if d == "math") / 6
    assert math.prompt_tokens_mean == pytest.approx(mean)
    assert everything.response_tokens == 120 and everything.response_tokens_p90 == 10
    assert everything.finished_share == 0
    assert length_statistics([tmp_path, tmp_path])[-1].trajectories == 24
