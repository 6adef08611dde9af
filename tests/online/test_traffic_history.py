from __future__ import annotations

import pytest
from online_traffic import recorded

from adaflash_hf.online.replay_buffer import ReplayBuffer
from adaflash_hf.online.traffic_history import acceptance_history


def test_an_empty_buffer_has_no_history(tmp_path):
    assert acceptance_history(ReplayBuffer(tmp_path / "buffer")).domains == {}


def test_each_piece_of_time_has_the_acceptance_of_its_own_traffic(tmp_path):
    buffer = ReplayBuffer(tmp_path / "buffer")
    rounds = {0.0: [(4, 0)], 10.0: [(4, 3)], 12.0: [(4, 1), (4, 1), (4, 1)], 39.0: [(4, 2)], 40.0: [(4, 0)]}
    for number, (second, pairs) in enumerate(rounds.items()):
        one = recorded(number, created_s=1000.0 + second)
        buffer.append([type(one).from_lists([5, number], [6, 7], pairs, domain="math", created_s=1000.0 + second)])
    buffer.append([type(one).from_lists([5], [6, 7], [(4, 1)], domain="code", created_s=1035.0)])
    history = acceptance_history(buffer, pieces=4)
    assert (history.first_s, history.piece_s) == (1000.0, 10.0)
    # In the second piece six drafts in four rounds; the newest trajectory is in the last piece, not in a fifth.
    assert history.domains == {"math": [1.0, 2.5, None, pytest.approx(2.0)], "code": [None, None, None, 2.0]}
