"""The engine in a background thread and under asyncio: nobody waits in vain, whatever happens."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import pytest
import torch
from engine_traffic import assert_nothing_left, engine_oracle, engine_target, plain_answer, prompt_ids
from tiny_models import tiny_target

from adaflash_hf import (
    AdaFlashEngine,
    AsyncEngine,
    EngineQueueFullError,
    EngineStoppedError,
    InvalidInputError,
)
from adaflash_hf.generation import engine_fronts


# A test that hangs fails by this, not by the clock of whoever runs it.
TIMEOUT = 900
# For what must not wait at all, on a machine that may stand still for a while.
WAIT = 60


def new_engine(**kwargs: Any) -> AdaFlashEngine:
    return AdaFlashEngine(engine_target(), engine_oracle(), **{"max_concurrency": 8, **kwargs})


def slow_engine() -> AdaFlashEngine:
    """Takes seconds for a long prompt: on a busy machine another could be through before this side has its turn."""
    engine = new_engine(prefill_chunk_tokens=1)
    engine.between_rounds(lambda: time.sleep(0.05))
    return engine


def answer(index: int, count: int) -> list[int]:
    return list(plain_answer("llama", index)[:count])


def test_threads_submit_stream_and_cancel() -> None:
    wrong: list[str] = []

    def owner(seed: int, engine: AdaFlashEngine) -> None:
        chance = random.Random(seed)
        for _ in range(5):
            index, count = chance.randrange(10), chance.randint(1, 20)
            handle = engine.submit(prompt_ids(index), max_new_tokens=count)
            if chance.random() < 0.3:
                for _ in zip(range(chance.randrange(3)), handle, strict=False):
                    pass
                handle.cancel()
                result = handle.result(TIMEOUT)
                if result.token_ids != answer(index, len(result.token_ids)):
                    wrong.append(f"{result} was cancelled")
            elif list(handle) != answer(index, count) or handle.result().token_ids != answer(index, count):
                wrong.append(str(handle))

    with new_engine() as engine:
        assert engine.is_running and engine.start() is engine
        owners = [threading.Thread(target=owner, args=(seed, engine)) for seed in range(5)]
        for thread in owners:
            thread.start()
        for thread in owners:
            thread.join(TIMEOUT)
        assert not any(thread.is_alive() for thread in owners)
    assert not engine.is_running and not wrong
    assert_nothing_left(engine)
    assert engine.statistics().submitted_requests == 25


def test_stop_drains_or_cancels() -> None:
    engine = new_engine().start()
    drained = [engine.submit(prompt_ids(index), max_new_tokens=12) for index in range(3)]
    engine.stop()
    assert all(handle.is_done for handle in drained)
    engine.start()
    cancelled = [engine.submit(prompt_ids(index), max_new_tokens=30) for index in range(3)]
    engine.stop(drain=False)
    assert {handle.result(TIMEOUT).finish_reason for handle in cancelled} <= {"cancelled", "length"}
    # Nobody runs rounds now but who waits.
    assert engine.submit(prompt_ids(1), max_new_tokens=3).result(TIMEOUT).token_ids == answer(1, 3)
    engine.stop()


def test_a_request_on_its_way_between_two_lists_is_drained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = new_engine()
    add, is_moving, goes_on = engine._scheduler.add, threading.Event(), threading.Event()

    def add_late(request: Any) -> None:
        is_moving.set()
        goes_on.wait(TIMEOUT)
        add(request)

    monkeypatch.setattr(engine._scheduler, "add", add_late)
    engine.start()
    handle = engine.submit(prompt_ids(1), max_new_tokens=3)
    assert is_moving.wait(TIMEOUT) and not engine.has_requests
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    stopping.join(0.05)
    goes_on.set()
    stopping.join(TIMEOUT)
    assert handle.is_done and handle.token_ids == answer(1, 3)


def test_stop_gives_up_draining() -> None:
    engine = slow_engine().start()
    handle = engine.submit([5] * 400, max_new_tokens=9)
    engine.stop(timeout=0.0)
    assert handle.result(TIMEOUT).finish_reason == "cancelled"


def test_starting_does_not_wait_for_a_stop_that_waits_for_a_round() -> None:
    engine, in_round, goes_on = new_engine(), threading.Event(), threading.Event()

    def hold() -> None:
        in_round.set()
        goes_on.wait(TIMEOUT)

    engine.between_rounds(hold)
    engine.start()
    assert in_round.wait(TIMEOUT)
    stopped = engine._thread._thread
    stopping = threading.Thread(target=engine.stop, args=(False,), daemon=True)
    stopping.start()
    while not engine._thread._signals.is_stopping:
        time.sleep(0.001)
    starting = threading.Thread(target=engine.start, daemon=True)
    starting.start()
    starting.join(WAIT)
    has_waited = starting.is_alive()
    goes_on.set()
    for thread in (starting, stopping, stopped):
        assert thread is not None
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    assert not has_waited
    # It was started after the stop had begun, so it runs, and in one thread alone.
    assert engine.is_running and engine._thread._thread is not stopped
    assert engine.submit(prompt_ids(1), max_new_tokens=3).result(TIMEOUT).token_ids == answer(1, 3)
    engine.stop()
    assert not engine.is_running


def test_a_stop_that_cancels_does_not_wait_for_one_that_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, is_draining, wait = slow_engine().start(), threading.Event(), engine_fronts._wait_until_idle

    def wait_noted(*args: Any) -> bool:
        is_draining.set()
        return wait(*args)

    monkeypatch.setattr(engine_fronts, "_wait_until_idle", wait_noted)
    handle = engine.submit([5] * 400, max_new_tokens=9)
    draining = threading.Thread(target=engine.stop)
    draining.start()
    assert is_draining.wait(TIMEOUT)
    engine.stop(drain=False)
    draining.join(TIMEOUT)
    assert not draining.is_alive() and not engine.is_running
    assert handle.result(TIMEOUT).finish_reason == "cancelled"


def test_leaving_by_an_exception_does_not_wait() -> None:
    with pytest.raises(KeyError), slow_engine() as engine:
        handle = engine.submit([5] * 400, max_new_tokens=9)
        raise KeyError("elsewhere")
    assert handle.result(TIMEOUT).finish_reason == "cancelled"


def test_timeout() -> None:
    handle = new_engine(prefill_chunk_tokens=1).submit([5] * 100, max_new_tokens=9)
    with pytest.raises(TimeoutError, match="not ready"):
        handle.result(timeout=0.0)
    handle.cancel()
    assert handle.result(TIMEOUT).token_ids == []


def test_a_callback_must_not_stop_its_engine() -> None:
    seen: list[Exception] = []

    def stops(result: Any) -> None:
        try:
            engine.stop()
        except RuntimeError as error:
            seen.append(error)

    with new_engine() as engine:
        engine.on_finished(stops)
        engine.submit(prompt_ids(1), max_new_tokens=2).result(TIMEOUT)
    assert "another thread" in str(seen[0])


def test_death_in_the_background() -> None:
    target = tiny_target("llama", num_hidden_layers=1)

    def fail(module: Any, args: Any) -> None:
        raise ArithmeticError("broken")

    engine = AdaFlashEngine(target)
    target.model.layers[0].register_forward_pre_hook(fail)
    handles = [engine.submit([5, 6], max_new_tokens=9) for _ in range(3)]
    engine.start()
    for handle in handles:
        with pytest.raises(EngineStoppedError, match="broken"):
            handle.result(TIMEOUT)
        with pytest.raises(EngineStoppedError, match="broken"):
            list(handle)
    with pytest.raises(EngineStoppedError, match="broken"):
        engine.submit([5])
    engine.stop()


def test_callbacks_are_called_while_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_fronts, "IDLE_S", 0.01)
    called = threading.Semaphore(0)
    with new_engine() as engine:
        engine.between_rounds(called.release)
        for _ in range(3):
            assert called.acquire(timeout=TIMEOUT)
        assert engine.statistics().steps == 0
        assert engine.submit(prompt_ids(1), max_new_tokens=3).result(TIMEOUT).token_ids == answer(1, 3)


def test_the_target_may_be_used_meanwhile() -> None:
    target = engine_target()
    with new_engine() as engine:
        handles = [engine.submit(prompt_ids(index), max_new_tokens=25) for index in range(6)]
        for index in range(3):
            ids = torch.tensor([prompt_ids(index)])
            assert target.generate(ids, max_new_tokens=9)[0, ids.shape[1] :].tolist() == answer(index, 9)
        for index, handle in enumerate(handles):
            assert handle.result(TIMEOUT).token_ids == answer(index, 25)


def test_a_forgotten_engine_ends_its_thread() -> None:
    engine = AdaFlashEngine(engine_target()).start()
    engine.submit(prompt_ids(1), max_new_tokens=2).result(TIMEOUT)
    thread, reference = engine._thread._thread, weakref.ref(engine)
    del engine
    gc.collect()
    assert thread is not None
    thread.join(TIMEOUT)
    assert not thread.is_alive()
    gc.collect()
    assert reference() is None


@pytest.mark.slow
def test_the_interpreter_ends_with_a_running_engine() -> None:
    program = (
        "from engine_traffic import engine_target, prompt_ids\n"
        "from adaflash_hf import AdaFlashEngine\n"
        "engine = AdaFlashEngine(engine_target(), prefill_chunk_tokens=1).start()\n"
        "handle = engine.submit([5] * 400, max_new_tokens=90)\n"
    )
    path = ":".join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, timeout=TIMEOUT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


# asyncio


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, TIMEOUT))


def test_many_tasks() -> None:
    async def one(front: AsyncEngine, number: int) -> bool:
        index, count = number % 10, 3 + number
        if number % 3 == 0:
            return (await front.generate(prompt_ids(index), max_new_tokens=count)).token_ids == answer(index, count)
        if number % 3 == 1:
            tokens = [token async for token in front.stream(prompt_ids(index), max_new_tokens=count)]
            return tokens == answer(index, count)
        handle = await front.submit(prompt_ids(index), max_new_tokens=count)
        tokens = [token async for token in handle]
        return tokens == (await handle).token_ids == answer(index, count)

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            assert all(await asyncio.gather(*(one(front, number) for number in range(12))))

    engine = new_engine()
    run(main())
    assert not engine.is_running
    assert_nothing_left(engine)


def test_leaving_a_stream_or_a_task_cancels_the_request() -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as front:
            stream = front.stream([5] * 3, max_new_tokens=500)
            async for _ in stream:
                break
            await stream.aclose()
            task = asyncio.create_task(front.generate([6] * 3, max_new_tokens=500))
            while engine.statistics().submitted_requests < 2:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    engine = slow_engine()
    run(main())
    assert engine.statistics().finished_requests == {"cancelled": 2}


@pytest.mark.parametrize("is_through", [False, True])
def test_a_task_cancelled_while_it_submits_cancels_the_request(is_through: bool) -> None:
    """The worker thread that submits is not stopped by it, and nobody would hold the handle."""
    engine = slow_engine()
    submit, entered, may_go_on = engine.submit, threading.Event(), threading.Event()

    def slow_submit(*args: Any, **kwargs: Any) -> Any:
        handle = submit(*args, **kwargs) if is_through else None
        entered.set()
        assert may_go_on.wait(TIMEOUT)
        return handle or submit(*args, **kwargs)

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            task = asyncio.create_task(front.generate([6] * 3, max_new_tokens=500))
            await asyncio.to_thread(entered.wait, TIMEOUT)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            may_go_on.set()
            while engine.statistics().finished_requests != {"cancelled": 1}:
                await asyncio.sleep(0.01)

    engine.submit = slow_submit  # type: ignore[method-assign]
    run(main())


def test_backpressure() -> None:
    async def main() -> None:
        async with AsyncEngine(engine) as front:
            many = [front.submit(prompt_ids(1), max_new_tokens=4, wait_for_queue=True) for _ in range(9)]
            handles = await asyncio.gather(*many)
            for handle in handles:
                assert (await handle).token_ids == answer(1, 4)
        for _ in range(2):
            engine.submit(prompt_ids(1), max_new_tokens=4)
        with pytest.raises(EngineQueueFullError):
            await front.submit(prompt_ids(1), max_new_tokens=4)

    engine = new_engine(max_concurrency=1, max_queue=2)
    run(main())


def test_awaiting_an_engine_that_does_not_run() -> None:
    async def stopped_meanwhile() -> None:
        engine.start()
        late = engine.submit([5] * 400, max_new_tokens=9)
        waiting = asyncio.create_task(late.wait_for_result())
        await asyncio.sleep(0)
        await asyncio.to_thread(engine.stop, False)
        assert (await waiting).finish_reason == "cancelled"

    async def never_started() -> None:
        handle = engine.submit(prompt_ids(1), max_new_tokens=3)
        with pytest.raises(InvalidInputError, match="start"):
            await handle
        handle.cancel()
        engine.step()
        assert [token async for token in handle] == (await handle).token_ids == []

    engine = slow_engine()
    run(stopped_meanwhile())
    run(never_started())


def test_errors_are_awaited_too() -> None:
    def breaks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    async def main() -> None:
        async with AsyncEngine(engine) as front:
            with pytest.raises(KeyError, match="mine"):
                await front.generate(prompt_ids(1), max_new_tokens=3, logits_processor=[breaks])
            with pytest.raises(KeyError, match="mine"):
                async for _ in front.stream(prompt_ids(1), max_new_tokens=3, logits_processor=[breaks]):
                    pass
            with pytest.raises(InvalidInputError):
                await front.submit([])

    engine = new_engine()
    run(main())
