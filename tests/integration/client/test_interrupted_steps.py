"""Steps that are interrupted: each batch is applied with a result of its own, or not at all."""

from __future__ import annotations

import _thread
import asyncio
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Any

import pytest
from grpc._channel import _SingleThreadedRendezvous

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    assert_weights,
    batches,
    make_trainer,
    stepped_plainly,
)
from trocar_server.training.step.core import TrainerCore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models=MODELS, data_dir=tmp_path / "data")


@pytest.fixture
def after_first_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Have the server call something, with the step's guard, after its first step has changed the weights."""

    def patch(then: Callable[[Any], None]) -> None:
        step, pending = TrainerCore.step, [then]

        def stepped(core: TrainerCore, batch: Any, guard: Any) -> Any:
            result = step(core, batch, guard)
            if pending:
                pending.pop()(guard)
            return result

        monkeypatch.setattr(TrainerCore, "step", stepped)

    return patch


async def test_the_batch_after_a_cancelled_step_is_not_lost(
    running: RunningServer, after_first_step: Callable[[Callable[[Any], None]], None], tmp_path: Path
) -> None:
    """The cancelled step is past the point of no return, and still runs when the next one is called."""
    given, began, may_end = batches(2), asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def linger(_: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(30)

    after_first_step(linger)
    async with trocar.aio.connect(running.address) as client:
        trainer = await client.train("tiny", optimizer=trocar.training.sgd(lr=0.05, momentum=0.9), seed=7)
        first = asyncio.create_task(trainer.step(*given[0]))
        await began.wait()
        first.cancel()
        await asyncio.wait([first])  # it keeps its exception
        second = asyncio.create_task(trainer.step(*given[1]))
        await asyncio.wait([second], timeout=0.3)
        may_end.set()
        result = await second
        assert (result.number, result.update_count) == (1, 2)
        trainer_id = trainer.trainer_id
    with trocar.connect(running.address) as again:
        assert_weights(again.trainer(trainer_id), stepped_plainly(given), tmp_path)


def test_the_batch_after_a_step_without_time_is_not_lost(
    running: RunningServer, after_first_step: Callable[[Callable[[Any], None]], None], tmp_path: Path
) -> None:
    given, may_end = batches(2), threading.Event()

    def linger(_: Any) -> None:
        may_end.wait(30)

    after_first_step(linger)
    with trocar.connect(running.address) as client:
        trainer = make_trainer(client)
        with pytest.raises(trocar.errors.DeadlineExceededError):
            trainer.step(*given[0], timeout_s=0.3)
        threading.Timer(0.3, may_end.set).start()
        assert trainer.step(*given[1]).update_count == 2
        assert_weights(trainer, stepped_plainly(given), tmp_path)


def test_an_interrupted_step_is_cancelled_on_the_server(
    running: RunningServer, after_first_step: Callable[[Callable[[Any], None]], None]
) -> None:
    """Although the exception, and with it the call, is kept."""
    given, is_stopped = batches(2), threading.Event()

    def interrupt(guard: Any) -> None:
        _await_reader()  # Note: [Interrupted call]: before, there is no call to cancel yet
        _thread.interrupt_main()
        until = time.monotonic() + 5
        while guard._reason is None and time.monotonic() < until:
            time.sleep(0.01)
        if guard._reason is not None:
            is_stopped.set()

    after_first_step(interrupt)
    with trocar.connect(running.address) as client:
        trainer = make_trainer(client)
        with pytest.raises(KeyboardInterrupt) as kept:
            trainer.step(*given[0])
        assert is_stopped.wait(10)
        assert trainer.step(*given[1]).update_count == 2
        assert kept.value is not None


def _await_reader() -> None:
    """Wait until the main thread reads a reply: a busy machine may run a whole step before it does."""
    until, reads = time.monotonic() + 30, _SingleThreadedRendezvous._next.__code__
    main = threading.main_thread().ident
    assert main is not None
    while all(frame.f_code is not reads for frame, _ in traceback.walk_stack(sys._current_frames()[main])):
        assert time.monotonic() < until, "the main thread does not read a reply"
        time.sleep(0.001)
