"""What has begun comes to its end, whoever stops waiting."""

import asyncio

import pytest

from trocar_server.tasks import all_done, shielded


async def test_the_result_and_the_error_are_the_works() -> None:
    async def answer() -> int:
        return 7

    async def fail() -> int:
        raise ValueError("no")

    assert await shielded(answer()) == 7
    with pytest.raises(ValueError, match="no"):
        await shielded(fail())


async def test_a_cancelled_call_waits_for_the_end_of_its_work() -> None:
    goes_on, done = asyncio.Event(), list[str]()

    async def work() -> None:
        await goes_on.wait()
        done.append("work")

    call = asyncio.create_task(shielded(work()))
    for _ in range(3):
        await asyncio.sleep(0)
        call.cancel()
    assert not call.done()
    everything = asyncio.create_task(all_done())
    goes_on.set()
    await everything
    with pytest.raises(asyncio.CancelledError):
        await call
    assert done == ["work"]
