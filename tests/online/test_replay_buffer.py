from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sqlite3
from collections import Counter

import pytest
from online_traffic import in_fork, kill_after, recorded

from adaflash_hf.errors import InvalidInputError, ReplayBufferError
from adaflash_hf.online.recorded_trajectory import RecordedTrajectory
from adaflash_hf.online.replay_buffer import MAX_DOMAINS, OTHER_DOMAIN, BufferSettings, ReplayBuffer


def make_buffer(path, **settings):
    return ReplayBuffer(path / "buffer.sqlite", BufferSettings(**{"held_out_share": 0.0, **settings}))


def ids_of(trajectories):
    return [trajectory.id for trajectory in trajectories]


def test_what_comes_out_is_what_went_in(tmp_path):
    original = recorded(3, drafter_version=7, created_s=12.5, request_id="r", text="so", finished=False)
    assert make_buffer(tmp_path).append([original]) == 1
    (found,) = ReplayBuffer(tmp_path / "buffer.sqlite").newest(5)
    for name, value in vars(original).items():
        if name in ("token_ids", "rounds"):
            assert getattr(found, name).tolist() == value.tolist()
        elif name != "id":
            assert getattr(found, name) == value
    assert found.id == 1


def test_no_text_is_stored_unless_given(tmp_path):
    buffer = make_buffer(tmp_path)
    buffer.append([recorded()])
    assert buffer.newest(1)[0].text is None


def test_a_request_delivered_twice_is_stored_once(tmp_path):
    buffer = make_buffer(tmp_path)
    assert buffer.append([recorded(1, request_id="a"), recorded(2, request_id="b"), recorded(1, request_id="a")]) == 2
    assert buffer.append([recorded(1, request_id="a"), recorded(4), recorded(4)]) == 2


def test_a_bad_trajectory_keeps_the_whole_batch_out(tmp_path):
    buffer = make_buffer(tmp_path)
    with pytest.raises(InvalidInputError):
        buffer.append([recorded(), RecordedTrajectory.from_lists([1, 2], [])])
    with pytest.raises(InvalidInputError, match="max_bytes"):
        make_buffer(tmp_path, max_bytes=150).append([recorded()])
    assert buffer.depth().rows == 0


@pytest.mark.parametrize("limit", ["max_rows", "max_bytes"])
def test_it_is_bounded_and_the_oldest_go_first(tmp_path, limit):
    size = recorded().num_bytes
    buffer = make_buffer(tmp_path, **{limit: 5 if limit == "max_rows" else 5 * size + size // 2})
    for seed in range(12):
        buffer.append([recorded(seed)])
    assert ids_of(buffer.newest(100)) == [8, 9, 10, 11, 12]
    depth = buffer.depth()
    assert (depth.rows, depth.bytes, depth.appended) == (5, 5 * size, 12)


def test_a_busy_domain_does_not_push_a_quiet_one_out(tmp_path):
    buffer = make_buffer(tmp_path, max_rows=8)
    buffer.append([recorded(seed, "math") for seed in range(3)])
    buffer.append([recorded(seed, "code") for seed in range(100, 140)])
    assert buffer.depth().by_domain == {"math": 3, "code": 5}


def test_trained_rows_go_before_waiting_ones(tmp_path):
    buffer = make_buffer(tmp_path, max_rows=4)
    buffer.append([recorded(seed) for seed in range(4)])
    buffer.confirm(buffer.claim(2).id)  # the newest two: 3 and 4
    buffer.append([recorded(9)])
    assert ids_of(buffer.newest(9)) == [1, 2, 4, 5]


def test_rows_of_the_open_round_stay_until_it_ends(tmp_path):
    buffer = make_buffer(tmp_path, max_rows=4)
    buffer.append([recorded(seed) for seed in range(4)])
    opened = buffer.claim(3)
    buffer.append([recorded(seed) for seed in range(10, 13)])
    assert ids_of(buffer.newest(9)) == [2, 3, 4, 7]
    buffer.confirm(opened.id)
    buffer.append([recorded(20)])
    assert ids_of(buffer.newest(9)) == [3, 4, 7, 8]


def test_made_up_domains_end_in_one(tmp_path):
    buffer = make_buffer(tmp_path)
    buffer.append([recorded(seed, f"domain-{seed}") for seed in range(MAX_DOMAINS + 20)])
    by_domain = buffer.depth().by_domain
    assert len(by_domain) == MAX_DOMAINS + 1
    assert by_domain[OTHER_DOMAIN] == 20


def test_rows_of_one_prompt_are_on_one_side(tmp_path):
    buffer = make_buffer(tmp_path, held_out_share=0.3)
    buffer.append([recorded(seed % 40) for seed in range(120)])
    held_out = Counter(tuple(one.token_ids.tolist()) for one in buffer.held_out(1000))
    assert set(held_out.values()) == {3}
    assert 3 <= len(held_out) <= 22  # 12 expected
    opened = buffer.claim(1000)
    assert len(opened.trajectory_ids) == 120 - sum(held_out.values())


def test_rounds_take_the_newest_first_and_each_row_once(tmp_path):
    buffer = make_buffer(tmp_path)
    buffer.append([recorded(seed) for seed in range(10)])
    first = buffer.claim(4)
    assert first.trajectory_ids == (7, 8, 9, 10)
    assert buffer.claim(4) == first == buffer.open_round()  # a trainer that starts again
    buffer.append([recorded(50)])
    assert buffer.confirm(first.id)
    assert not buffer.confirm(first.id)
    second = buffer.claim(4)
    assert second.trajectory_ids == (4, 5, 6, 11)
    assert buffer.abandon(second.id)
    assert buffer.claim(4).trajectory_ids == second.trajectory_ids


def test_a_round_needs_something_to_train_on(tmp_path):
    with pytest.raises(InvalidInputError, match="no trajectory"):
        make_buffer(tmp_path).claim(3)


def test_balanced_rounds_repeat_what_a_domain_had(tmp_path):
    buffer = make_buffer(tmp_path)
    buffer.append([recorded(seed, "math") for seed in range(6)])
    buffer.confirm(buffer.claim(6).id)
    buffer.append([recorded(seed, "code") for seed in range(10, 18)])
    opened = buffer.claim(8, balanced=True)
    domains = Counter(one.domain for one in buffer.read(opened.trajectory_ids))
    assert domains == {"math": 4, "code": 4}
    buffer.confirm(opened.id)
    # The next one prefers maths that was trained on once over maths that was trained on twice.
    again = buffer.claim(4, balanced=True)
    assert {1, 2} == set(again.trajectory_ids) & {1, 2, 3, 4, 5, 6}


def test_held_out_slices_are_recent_and_can_be_balanced(tmp_path):
    buffer = make_buffer(tmp_path, held_out_share=0.5)
    buffer.append([recorded(seed, "math") for seed in range(40)])
    buffer.append([recorded(seed, "code") for seed in range(100, 140)])
    assert {one.domain for one in buffer.held_out(6)} == {"code"}
    assert Counter(one.domain for one in buffer.held_out(6, balanced=True)) == {"code": 3, "math": 3}
    newest = ids_of(buffer.held_out(1000))
    assert ids_of(buffer.held_out(6)) == newest[-6:]


def test_acceptance_by_domain_and_version(tmp_path):
    buffer = make_buffer(tmp_path)
    buffer.append([recorded(1, "math", created_s=10.0), recorded(2, "math", created_s=20.0)])
    buffer.append([recorded(3, "code", drafter_version=2, created_s=30.0)])
    found = {(one.domain, one.drafter_version): one for one in buffer.acceptance()}
    assert found["math", 0].rounds == 4
    assert found["math", 0].accepted == 8
    assert found["math", 0].acceptance_length == 3.0
    assert {(one.domain, one.rounds) for one in buffer.acceptance(since_s=15.0)} == {("math", 2), ("code", 2)}


def test_another_target_is_refused_and_limits_may_move(tmp_path):
    make_buffer(tmp_path, target="org/one", max_rows=7)
    with pytest.raises(InvalidInputError, match="org/one"):
        make_buffer(tmp_path, target="org/other")
    with pytest.raises(InvalidInputError, match="held_out_share"):
        make_buffer(tmp_path, held_out_share=0.4)
    assert make_buffer(tmp_path, target="org/one", max_rows=9).settings.max_rows == 9
    assert ReplayBuffer(tmp_path / "buffer.sqlite").settings.target == "org/one"


def test_whoever_looks_first_does_not_settle_what_the_buffer_is_for(tmp_path):
    reader, late = (ReplayBuffer(tmp_path / "buffer.sqlite") for _ in range(2))
    maker = make_buffer(tmp_path, target="org/one", max_rows=3)
    trainer = ReplayBuffer(maker.path, BufferSettings(held_out_share=0.4, target="org/two"), takes_existing=True)
    assert trainer.settings == maker.settings
    reader.append([recorded(seed) for seed in range(6)])
    assert reader.settings == maker.settings
    assert late.depth().rows == 3
    opened = late.claim(3)
    make_buffer(tmp_path, target="org/one", max_rows=2)
    late.confirm(opened.id)
    assert late.depth().rows == 2
    # Appending does: from the first row on, some are held out.
    another = tmp_path / "another.sqlite"
    ReplayBuffer(another).append([recorded()])
    with pytest.raises(InvalidInputError, match="held_out_share"):
        ReplayBuffer(another, BufferSettings(held_out_share=0.4))


def make_until_killed(path, settings, nth):
    statements = itertools.count()

    class Deadly(sqlite3.Connection):
        def execute(self, *args):
            if next(statements) == nth:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().execute(*args)

    sqlite3.connect = functools.partial(sqlite3.connect, factory=Deadly)
    ReplayBuffer(path, settings)


def test_killed_at_any_statement_of_making_it_the_next_one_makes_it(tmp_path):
    wanted = BufferSettings(held_out_share=0.25, target="org/one")
    for nth in itertools.count():
        path = tmp_path / f"buffer-{nth}.sqlite"
        with in_fork(make_until_killed, path, wanted, nth) as process:
            process.join(600)
        ReplayBuffer(path).depth()  # a status page, for example
        assert ReplayBuffer(path, wanted).settings == wanted
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert nth > 20


def test_a_buffer_has_an_identity_of_its_own(tmp_path):
    identity = make_buffer(tmp_path).identity()
    assert make_buffer(tmp_path).identity() == identity
    for path in tmp_path.glob("buffer*"):
        path.unlink()
    assert make_buffer(tmp_path).identity() != identity


def test_only_one_process_trains(tmp_path):
    buffer = make_buffer(tmp_path)
    with buffer.consumer_lock():
        with pytest.raises(ReplayBufferError, match="another trainer"), make_buffer(tmp_path).consumer_lock():
            pass
    with make_buffer(tmp_path).consumer_lock():
        pass


def append_until_killed(path, writer, batch):
    buffer = ReplayBuffer(path, busy_timeout_s=600.0)  # the other writer may be kept waiting while it has the lock
    number = 0
    while True:
        seeds = range(number, number + batch)
        buffer.append([recorded(writer * 10**6 + s, f"writer-{writer}", request_id=f"{writer}/{s}") for s in seeds])
        number += batch


def test_writers_killed_at_random_instants_leave_whole_batches(tmp_path):
    buffer = make_buffer(tmp_path)
    for round_ in range(6):
        with in_fork(append_until_killed, buffer.path, 2 * round_, 3) as one:
            with in_fork(append_until_killed, buffer.path, 2 * round_ + 1, 3) as two:
                expected = {f"writer-{2 * round_}", f"writer-{2 * round_ + 1}"}
                while not expected <= buffer.depth().by_domain.keys():
                    assert one.is_alive() and two.is_alive()
                kill_after(one, 0.01 + 0.007 * round_)
            assert two.exitcode == -signal.SIGKILL
        assert one.exitcode == -signal.SIGKILL
    rows = buffer.newest(10**6)
    assert len(rows) == buffer.depth().appended
    per_writer = Counter(one.domain for one in rows)
    assert len(per_writer) == 12
    assert all(count % 3 == 0 for count in per_writer.values())


def train_until_killed(path, log):
    """A consumer that notes each trajectory it has trained on in the same instant as its own progress is safe."""
    buffer = ReplayBuffer(path)
    with buffer.consumer_lock():
        while buffer.depth().waiting:
            opened = buffer.claim(3)
            done = log.read_text().splitlines() if log.exists() else []
            if str(opened.id) not in {line.split(":")[0] for line in done}:
                aside = log.with_suffix(".new")
                ids = ",".join(map(str, opened.trajectory_ids))
                aside.write_text("\n".join([*done, f"{opened.id}:{ids}"]) + "\n")
                os.replace(aside, log)
            buffer.confirm(opened.id)


def num_lines(path):
    return len(path.read_text().splitlines()) if path.exists() else 0


def test_a_trainer_killed_at_random_instants_trains_on_each_row_once(tmp_path):
    buffer, log = make_buffer(tmp_path), tmp_path / "log"
    appended = 0
    for seed in range(6):
        # However fast the trainer is, there is work for it when it is killed.
        rows = max(0, 90 - buffer.depth().waiting)
        buffer.append([recorded(appended + i) for i in range(rows)])
        appended += rows
        before = num_lines(log)
        with in_fork(train_until_killed, buffer.path, log) as process:
            while process.is_alive() and num_lines(log) < before + 3:
                pass
            kill_after(process, random.Random(seed).uniform(0, 0.01))
    with in_fork(train_until_killed, buffer.path, log) as process:
        process.join()
    trained = [int(i) for line in log.read_text().splitlines() for i in line.split(":")[1].split(",")]
    assert sorted(trained) == list(range(1, appended + 1))
