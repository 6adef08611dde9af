from __future__ import annotations

import pytest
from online_traffic import recorded

from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer
from adaflash_hf.serving.acceptance_probe import ProbeResult, ServerProbe


@pytest.mark.parametrize(
    ("before", "after", "collapsed"),
    [
        (ProbeResult(100, 200), ProbeResult(100, 200), False),
        (ProbeResult(100, 200), ProbeResult(150, 151), False),  # half as many a round, and one more
        (ProbeResult(100, 200), ProbeResult(150, 140), True),
        (ProbeResult(100, 200), ProbeResult(300, 0), True),
        (ProbeResult(100, 0), ProbeResult(100, 0), False),
        (ProbeResult(4, 5), ProbeResult(9, 0), True),
        (ProbeResult(2, 2), ProbeResult(4, 0), False),  # too few to tell
        (ProbeResult(0, 0), ProbeResult(9, 0), False),
        (ProbeResult(9, 20), ProbeResult(0, 0), False),
    ],
)
def test_collapse(before: ProbeResult, after: ProbeResult, collapsed: bool) -> None:
    assert after.has_collapsed(before, 0.5) is collapsed


def test_acceptance_length() -> None:
    assert ProbeResult(4, 6).acceptance_length == 2.5
    assert ProbeResult(0, 0).acceptance_length == 0


def test_prompts_are_those_of_the_traffic_held_out_where_there_are_any(tmp_path) -> None:
    buffer = ReplayBuffer(tmp_path / "buffer", BufferSettings(held_out_share=0.5))
    probe = ServerProbe(buffer.path, num_prompts=6)
    assert all(isinstance(prompt, str) for prompt in probe.prompts())  # public ones, while the buffer is empty
    buffer.append([recorded(seed) for seed in range(30)])
    held_out = [one.token_ids[: one.prompt_length].tolist() for one in buffer.held_out(99)]
    prompts = probe.prompts()
    assert len(prompts) == 6 and all(prompt in held_out for prompt in prompts)
    assert probe.prompts() == prompts


def test_public_prompts_are_of_all_kinds() -> None:
    prompts = ServerProbe(num_prompts=6).prompts()
    assert len(set(map(str, prompts))) == 6
    assert any("def " in str(prompt) for prompt in prompts)
    assert ServerProbe(num_prompts=0).prompts() == []
