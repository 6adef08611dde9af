from __future__ import annotations

import sqlite3
import threading
import time

import pytest
import torch
from online_traffic import in_fork, recorded
from tiny_models import tiny_drafter, tiny_target

from adaflash_hf.errors import InvalidInputError
from adaflash_hf.generation.drafter_hooks import traffic_domain
from adaflash_hf.generation.engine import AdaFlashEngine
from adaflash_hf.generation.engine_requests import RequestResult
from adaflash_hf.online.recorder import TrajectoryRecorder
from adaflash_hf.online.replay_buffer import BufferSettings, ReplayBuffer


PROMPT = torch.tensor([[5, 9, 11, 20, 31]])


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


def result(number=0, tokens=6, reason="length", **fields):
    token_ids = [10 + (number + i) % 80 for i in range(tokens)]
    return RequestResult(number, [5, 6, 7], token_ids, reason, rounds=[(4, 2)], **fields)


def test_generate_and_engine_leave_the_same_trajectories(target, tmp_path):
    drafter = tiny_drafter(target)
    found = []
    for name in ("generate", "engine"):
        path = tmp_path / name
        with TrajectoryRecorder(path) as recorder:
            if name == "generate":
                recorder.attach(drafter)
                with traffic_domain("math"):
                    target.generate(PROMPT, assistant_model=drafter, max_new_tokens=9, do_sample=False)
            else:
                engine = AdaFlashEngine(target, drafter)
                engine.drafter_version = 0
                recorder.attach_engine(engine)
                engine.submit(PROMPT, max_new_tokens=9, do_sample=False, domain="math").result()
            assert recorder.flush(600)
            assert recorder.counts.written == recorder.counts.received == 1
        found += ReplayBuffer(path).newest(9)
    assert found[0].token_ids.tolist() == found[1].token_ids.tolist()
    assert found[0].rounds.tolist() == found[1].rounds.tolist()
    assert found[0].prompt_length == 5
    assert {one.domain for one in found} == {"math"}
    assert not found[0].finished


def test_nothing_is_recorded_after_closing(target, tmp_path):
    drafter = tiny_drafter(target)
    recorder = TrajectoryRecorder(tmp_path / "buffer")
    recorder.attach(drafter)
    recorder.close()
    target.generate(PROMPT, assistant_model=drafter, max_new_tokens=4, do_sample=False)
    assert recorder.counts.received == 0


def test_what_cannot_be_learned_from_is_counted_not_stored(tmp_path):
    with TrajectoryRecorder(tmp_path / "buffer", max_tokens=8) as recorder:
        for each in (
            result(1, tokens=1),
            result(2, reason="error"),
            RequestResult(3, [5] * 7, [1, 2, 3], "stop"),
            RequestResult(4, [5], [], "cancelled"),
            result(5, tokens=20, reason="stop"),
            result(6, tokens=3, reason="cancelled"),
        ):
            recorder.record(each)
        assert recorder.flush(600)
        counts = recorder.counts
    assert (counts.too_short, counts.invalid, counts.written) == (3, 1, 2)
    cut, cancelled = ReplayBuffer(tmp_path / "buffer").newest(9)
    assert len(cut.token_ids) == 8
    assert not cut.finished
    assert not cancelled.finished


def test_text_is_kept_only_when_asked_for(tmp_path):
    with TrajectoryRecorder(tmp_path / "buffer", decode_text=lambda ids: f"{len(ids)} tokens") as recorder:
        recorder.record(result())
        assert recorder.flush(600)
    assert ReplayBuffer(tmp_path / "buffer").newest(1)[0].text == "6 tokens"


def test_a_full_queue_drops_and_counts_while_writing_is_blocked(tmp_path):
    path = tmp_path / "buffer"
    recorder = TrajectoryRecorder(path, max_queue=5, flush_interval_s=0.01)
    blocker = sqlite3.connect(path, isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    for number in range(200):
        recorder.record(result(number))
    counts = recorder.counts
    assert counts.received == 200
    assert counts.dropped >= 200 - 5 - 64 - 1
    blocker.execute("ROLLBACK")
    assert recorder.flush(600)
    counts = recorder.counts
    assert counts.written + counts.dropped == 200
    recorder.close()


def test_a_mark_is_passed_only_when_all_before_it_is_written(tmp_path, monkeypatch):
    append, is_writing, may_write = ReplayBuffer.append, threading.Event(), threading.Event()

    def held_up(buffer, trajectories):
        is_writing.set()
        assert may_write.wait(600)
        return append(buffer, trajectories)

    monkeypatch.setattr(ReplayBuffer, "append", held_up)
    with TrajectoryRecorder(tmp_path / "buffer", flush_interval_s=1.0) as recorder:
        recorder.record(result())
        mark = recorder.mark()
        for number in range(1, 64):  # with nothing to write, and in one batch with the one that has
            recorder.record(result(number, tokens=1))
        assert is_writing.wait(600)
        assert not recorder.is_past(mark)
        may_write.set()
        assert recorder.flush(600)
        assert recorder.is_past(recorder.mark())
    assert recorder.counts.written == 1


def test_a_buffer_that_cannot_be_opened_is_tried_again(tmp_path, caplog):
    path = tmp_path / "later" / "buffer"
    with TrajectoryRecorder(path, flush_interval_s=0.01) as recorder:
        recorder.record(result())
        while recorder.counts.write_failures < 2:  # at once, and by the thread
            assert not recorder.flush(0.01)
        assert "directory exists" in recorder.counts.last_error
        path.parent.mkdir()
        assert recorder.flush(600)
        counts = recorder.counts
    assert (counts.written, counts.last_error) == (1, "")
    assert counts.write_failures >= 2
    assert sum("Recorder" in record.message for record in caplog.records) == 1


def test_a_damaged_buffer_loses_nothing_that_still_fits_the_queue(tmp_path):
    path = tmp_path / "buffer"
    with TrajectoryRecorder(path, flush_interval_s=0.01) as recorder:
        recorder.record(result(1))
        assert recorder.flush(600)
        for each in tmp_path.glob("buffer*"):
            each.unlink()
        path.write_text("not a database any more " * 1000)
        recorder.record(result(2))
        assert not recorder.flush(0.3)
        path.unlink()
        assert recorder.flush(600)
    assert len(ReplayBuffer(path).newest(9)) == 1


def test_what_could_not_be_written_by_the_end_is_counted_as_lost(tmp_path):
    recorder = TrajectoryRecorder(tmp_path / "nowhere" / "buffer")
    recorder.record(result())
    recorder.close(timeout_s=0.3)
    recorder._thread.join(600)  # a busy machine may not have let it end in that time
    assert recorder.counts.lost == 1


def test_another_target_is_refused_before_serving(tmp_path):
    ReplayBuffer(tmp_path / "buffer", BufferSettings(target="org/one"))
    with pytest.raises(InvalidInputError, match="org/one"):
        TrajectoryRecorder(tmp_path / "buffer", BufferSettings(target="org/two"))


def test_flush_waits_for_what_the_thread_has_not_seen_yet(tmp_path, monkeypatch):
    with TrajectoryRecorder(tmp_path / "buffer", flush_interval_s=0.001) as recorder:
        recorder.record(result(1))
        assert recorder.flush(600)
        put = recorder._queue.put_nowait

        def put_late(one):
            time.sleep(0.05)  # the thread looks at the empty queue many times
            put(one)

        monkeypatch.setattr(recorder._queue, "put_nowait", put_late)
        for number in range(2, 6):
            recorder.record(result(number))
            assert recorder.flush(600)
            assert recorder.counts.written == number


def test_what_waits_at_a_fork_is_written_once(tmp_path, monkeypatch):
    path, may_go_on = tmp_path / "buffer", []
    with TrajectoryRecorder(path, flush_interval_s=0.01) as recorder:
        write = recorder._write

        def write_later(waiting):
            # Not by an event, whose lock this thread could have at the fork: in the child nobody would give it back.
            while not may_go_on:
                time.sleep(0.01)
            return write(waiting)

        monkeypatch.setattr(recorder, "_write", write_later)
        for number in range(80):  # more than one batch: some wait in the queue
            recorder.record(result(number))

        def child():
            may_go_on.append(True)
            recorder.record(result(99))
            assert recorder.flush(600)

        with in_fork(child) as process:
            process.join(900)
            assert process.exitcode == 0
        may_go_on.append(True)
        assert recorder.flush(600)
    assert ReplayBuffer(path).depth().rows == 81


def test_a_fork_records_too(tmp_path):
    with TrajectoryRecorder(tmp_path / "buffer") as recorder:
        recorder.record(result(1))
        assert recorder.flush(600)

        def child():
            recorder.record(result(2))
            assert recorder.flush(600)

        with in_fork(child) as process:
            process.join(900)
            assert process.exitcode == 0
    assert ReplayBuffer(tmp_path / "buffer").depth().rows == 2


class Pending:
    """What a collector hands over: work for the recorder's thread."""

    def __init__(self, made):
        self.made = made

    def trajectory(self):
        if isinstance(self.made, Exception):
            raise self.made
        return self.made


def test_others_may_leave_the_making_to_the_recorder(tmp_path):
    with TrajectoryRecorder(tmp_path / "buffer", max_tokens=12) as recorder:
        for made in (recorded(1), None, ValueError("no such token"), recorded(2, request_id="r")):
            recorder.record(Pending(made))
        assert recorder.flush(600)
        counts = recorder.counts
    assert (counts.received, counts.written, counts.too_short, counts.invalid) == (4, 2, 1, 1)
    assert [len(one.token_ids) for one in ReplayBuffer(tmp_path / "buffer").newest(9)] == [12, 12]


def test_a_mark_is_past_when_all_before_it_is_written(tmp_path, monkeypatch):
    goes_on = threading.Event()
    with TrajectoryRecorder(tmp_path / "buffer", flush_interval_s=0.01) as recorder:
        assert recorder.is_past(recorder.mark())
        write = recorder._write
        monkeypatch.setattr(recorder, "_write", lambda waiting: goes_on.wait(600) and write(waiting))
        recorder.record(result(1))
        one = recorder.mark()
        recorder.record(result(2, tokens=0))  # nothing to write
        recorder.record(result(3))
        assert not recorder.is_past(one)
        goes_on.set()
        assert recorder.flush(600)
        assert recorder.is_past(one) and recorder.is_past(recorder.mark())
        recorder.record(result(4))
        assert recorder.flush(600) and recorder.is_past(recorder.mark())
