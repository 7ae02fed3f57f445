"""Events have numbers without gaps, whatever becomes of the disk and of who watches."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.event_log import EventLog, LoggedEvent, NewEvent
from trocar_server.training.files.event_logs import EventLogs

ID, OTHER_ID = "a" * 32, "b" * 32


def event(kind: str = "step", step: int = 0) -> NewEvent:
    return NewEvent(kind, 1.0, {"step": step})


def reopened(path: Path) -> EventLog:
    log = EventLog(path)
    log.load()
    return log


async def test_numbers_go_on_after_a_restart(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    await log.add([event("started"), event()])
    again = reopened(tmp_path / "log.jsonl")
    await again.add([event("finished")])
    assert [found.number for found in again.since(0)] == [0, 1, 2]
    assert again.since(0) == reopened(tmp_path / "log.jsonl").since(0)


async def test_a_torn_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    await EventLog(path).add([event(), event()])
    path.write_text(path.read_text()[:-10])
    log = reopened(path)
    await log.add([event(step=7)])
    assert [found.facts["step"] for found in reopened(path).since(0)] == [0, 7]


async def test_adding_from_several_sides_keeps_the_order_on_disk(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    await asyncio.gather(*(log.add([event(step=step)]) for step in range(50)))
    assert reopened(tmp_path / "log.jsonl").since(0) == log.since(0)
    assert [found.number for found in log.since(0)] == list(range(50))


async def test_what_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    log = EventLog(folder / "log.jsonl")
    await log.add([event(step=1)])
    folder.mkdir()
    await log.add([event(step=2)])
    assert [found.facts["step"] for found in reopened(folder / "log.jsonl").since(0)] == [1, 2]


async def test_two_that_add_around_a_rewrite_write_each_event_once(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    log.skip_to(5)  # the next one writes the file anew
    await asyncio.gather(log.sync(), *(log.add([event(step=step)]) for step in range(3)))  # they wait for it
    await log.add([event("finished")])
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [5, 6, 7, 8]
    assert reopened(tmp_path / "log.jsonl").since(0) == log.since(0)


async def test_one_that_is_cancelled_while_it_writes_writes_each_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = EventLog(tmp_path / "log.jsonl")
    wrote, may_go_on, note = threading.Event(), threading.Event(), EventLog._note_written

    def slow(own: EventLog, events: Sequence[LoggedEvent]) -> None:
        wrote.set()
        assert may_go_on.wait(10)
        note(own, events)

    monkeypatch.setattr(EventLog, "_note_written", slow)
    first = asyncio.create_task(log.add([event("started")]))
    await asyncio.to_thread(wrote.wait)
    first.cancel()
    second = asyncio.create_task(log.add([event()]))
    for _ in range(20):  # another thread would write now
        await asyncio.to_thread(lambda: None)
    may_go_on.set()
    await asyncio.gather(first, second, return_exceptions=True)
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.EACCES])
async def test_a_log_that_cannot_be_read_now_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    logs = EventLogs(tmp_path)
    await (await logs.of(ID)).add([event("started"), event()])
    before = (tmp_path / f"{ID}.jsonl").read_bytes()

    def fail(*_: Any, **__: Any) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        for name in ("read_text", "read_bytes", "open"):
            patch.setattr(Path, name, fail)
        with pytest.raises(ServiceError) as caught:
            await EventLogs(tmp_path).of(ID)
    assert caught.value.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert (tmp_path / f"{ID}.jsonl").read_bytes() == before
    assert len((await EventLogs(tmp_path).of(ID)).since(0)) == 2


async def test_a_line_of_other_bytes_cuts_off_no_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    await EventLog(path).add([event(step=1), event(step=2)])
    path.write_bytes(path.read_bytes()[:-12] + b"\xff\xfe\x00")
    assert [found.facts["step"] for found in reopened(path).since(0)] == [1]


async def test_watchers_see_what_comes_and_end_with_the_fit(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")

    async def watch(number: int) -> list[LoggedEvent]:
        return [found async for found in log.watch(number)]

    watchers = [asyncio.create_task(watch(number)) for number in (0, 1, 2)]
    for kind in ("started", "step", "finished"):
        await log.add([event(kind)])
    seen = await asyncio.gather(*watchers)
    assert [[found.number for found in events] for events in seen] == [[0, 1, 2], [1, 2], [2]]


async def test_watchers_see_an_event_once_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before, the next server would give its number to another event, and show a step twice."""
    log, seen = EventLog(tmp_path / "log.jsonl"), list[int]()
    await log.add([event("started")])
    writes, may_go_on, append = threading.Event(), threading.Event(), EventLog._append

    def append_late(self: EventLog) -> None:
        writes.set()
        assert may_go_on.wait(60)
        append(self)

    monkeypatch.setattr(EventLog, "_append", append_late)

    async def watch() -> None:
        async for found in log.watch(0):
            seen.append(found.number)

    adding = asyncio.create_task(log.add([event("finished")]))
    await asyncio.to_thread(writes.wait, 60)
    watching = asyncio.create_task(watch())  # one that comes while it is written finds it in memory
    for _ in range(20):
        await asyncio.sleep(0)
    assert seen == [0]
    may_go_on.set()
    await asyncio.gather(adding, watching)
    assert seen == [0, 1]


async def test_watchers_are_let_go(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path)
    log = await logs.of(ID)

    async def watch() -> list[LoggedEvent]:
        return [found async for found in log.watch(0)]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await logs.forget(ID)
    with pytest.raises(ServiceError) as caught:
        await watching
    assert caught.value.reason is ErrorReason.UNKNOWN_TRAINER
    other = await logs.of(OTHER_ID)
    await logs.close()
    assert [found async for found in other.watch(0)] == []


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_watches_of_a_trainer_that_moves_end_and_its_log_stays(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path)
    log = await logs.of(ID)
    await log.add([event()])
    files = names_in(tmp_path)

    async def watch() -> list[LoggedEvent]:
        return [found async for found in log.watch(1)]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    await logs.let_go(ID)
    with pytest.raises(ServiceError, match="at another replica"):
        await asyncio.wait_for(watching, 60)  # or it would never end
    assert names_in(tmp_path) == files
    await logs.let_go(OTHER_ID)  # nobody watches it


async def test_logs_of_nobody_are_removed(tmp_path: Path) -> None:
    logs = EventLogs(tmp_path)
    for trainer_id in (ID, OTHER_ID):
        await (await logs.of(trainer_id)).add([event()])
    (tmp_path / f"{ID}.partial").touch()
    (tmp_path / "notes.txt").touch()
    await logs.clean({ID})
    assert {path.name for path in tmp_path.iterdir()} == {f"{ID}.jsonl", "notes.txt"}  # noqa: ASYNC240 - a test waits for nobody


async def test_a_log_that_is_gone_goes_on_behind_what_was_promised(tmp_path: Path) -> None:
    log = reopened(tmp_path / "log.jsonl")
    log.skip_to(20)
    await log.add([event("started")])
    assert (log.first_number, log.newest_fit_number) == (20, 20)
    assert reopened(tmp_path / "log.jsonl").since(0) == log.since(0)


@pytest.mark.parametrize("number", [-1, -(1 << 63), 0, 4])
async def test_a_watch_from_a_number_that_is_not_kept_lets_others_run(tmp_path: Path, number: int) -> None:
    """Of an empty log, and of one whose events before a number were lost."""
    for first in (0, 5):
        log = EventLog(tmp_path / f"{first}.jsonl")
        log.skip_to(first)
        watching = asyncio.create_task(numbers_from(log, number))
        await asyncio.sleep(0)
        await log.add([event("started"), event("finished")])
        expected = [first, first + 1]
        if number > first:
            assert not watching.done()
            await log.close()
            expected = []
        assert await watching == expected


async def numbers_from(log: EventLog, number: int) -> list[int]:
    return [found.number async for found in log.watch(number)]
