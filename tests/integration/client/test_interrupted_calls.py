"""Calls that Ctrl-C interrupts inside of gRPC, as it holds a lock: later ones run all the same."""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from torch import nn

import trocar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS = np.random.default_rng(0).standard_normal((4096, 96), np.float32)
SMALL = ROWS[:4]
LABELS = np.zeros(4, np.int64)
MOST_LOCKS, STEP = 201, 3
"""More often no call here takes and releases a lock; every third time is tried."""


@pytest.fixture
def client() -> Iterator[trocar.Client]:
    with trocar.connect(
        "local", models={"plain": {"module": Plain().eval(), "input_shape": (96,)}}
    ) as client:
        yield client


class Plain(nn.Module):
    """One layer, so that the oracle is one line of NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(96, 96)

    def forward(self, batch: Any) -> Any:
        return self.fc(batch)


class CtrlC:
    """Interrupts the main thread where a signal would: in `Condition`'s own methods, which are Python.

    There the lock is held, and the `with` statement that would release it has not begun, or has ended.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.after: int | None = None
        enter, leave = threading.Condition.__enter__, threading.Condition.__exit__

        def entered(condition: Any) -> Any:
            found = enter(condition)
            self._count()
            return found

        def left(condition: Any, *args: Any) -> Any:
            self._count()
            return leave(condition, *args)

        patch.setattr(threading.Condition, "__enter__", entered)
        patch.setattr(threading.Condition, "__exit__", left)

    def _count(self) -> None:
        if self.after is None or threading.get_ident() != threading.main_thread().ident:
            return
        caller = sys._getframe(2).f_code
        if "/grpc/" not in caller.co_filename or caller.co_name == "__del__":  # which drops every exception
            return
        self.after -= 1
        if self.after < 0:
            self.after = None
            raise KeyboardInterrupt


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> CtrlC:
    return CtrlC(monkeypatch)


def streamed(client: trocar.Client) -> list[Any]:
    with client.extract_stream("plain", [SMALL] * 3, "fc") as stream:
        return [result.unwrap()["fc"] for result in stream]


CALLS: dict[str, Callable[[trocar.Client, trocar.training.Trainer], object]] = {
    "models": lambda client, _: client.models(),
    "serving": lambda client, _: client.is_serving(),
    "extract": lambda client, _: client.extract("plain", SMALL, "fc"),
    "extract, chunks": lambda client, _: client.extract("plain", ROWS, "fc"),
    "stream": lambda client, _: streamed(client),
    "step": lambda _, trainer: trainer.step(SMALL, LABELS),
    "upload": lambda client, _: client.upload_dataset((SMALL, LABELS), name="rows"),
    "prepare": lambda client, _: client.prepare("plain", SMALL, "fc").close(),
}


@pytest.mark.parametrize("name", list(CALLS))
def test_streams_and_large_extracts_run_after_ctrl_c_inside_of_grpc(
    client: trocar.Client, ctrl_c: CtrlC, name: str
) -> None:
    """A call that hangs ends with pytest's own time limit."""
    trainer = client.train("plain", optimizer=trocar.training.sgd(lr=0.0))
    want, large = client.extract("plain", SMALL, "fc")["fc"], client.extract("plain", ROWS, "fc")["fc"].copy()
    number = 0
    for number in range(0, MOST_LOCKS, STEP):
        ctrl_c.after = number
        try:
            CALLS[name](client, trainer)
        except KeyboardInterrupt:
            ctrl_c.after = None
            assert all(np.array_equal(maps, want) for maps in streamed(client))
            assert np.array_equal(client.extract("plain", ROWS, "fc")["fc"], large)
        else:
            ctrl_c.after = None
            break
    assert 0 < number < MOST_LOCKS - STEP


def test_calls_of_other_threads_keep_their_own_time_after_ctrl_c(
    client: trocar.Client, ctrl_c: CtrlC, monkeypatch: pytest.MonkeyPatch
) -> None:
    retired = []
    monkeypatch.setattr("trocar._sync.connection.retire", lambda *given: retired.append(given))
    client.extract("plain", SMALL, "fc", options=trocar.options(timeout_s=3600.0))
    client.extract("plain", SMALL, "fc", options=trocar.options(timeout_s=1.0))
    ctrl_c.after = 0
    with pytest.raises(KeyboardInterrupt):
        client.models()
    ((channel, after_s),) = retired
    channel.close()
    assert after_s == 3600.0
