"""Events have numbers without gaps, whatever becomes of the disk and of who watches."""

import asyncio
from pathlib import Path

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


async def test_watchers_see_what_comes_and_end_with_the_fit(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "log.jsonl")

    async def watch(number: int) -> list[LoggedEvent]:
        return [found async for found in log.watch(number)]

    watchers = [asyncio.create_task(watch(number)) for number in (0, 1, 2)]
    for kind in ("started", "step", "finished"):
        await log.add([event(kind)])
    seen = await asyncio.gather(*watchers)
    assert [[found.number for found in events] for events in seen] == [[0, 1, 2], [1, 2], [2]]


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
