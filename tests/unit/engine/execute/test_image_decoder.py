"""Images in processes of their own: same pixels, ended by a cancel, fair, and never left behind."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import warm_python
from tests.support.servers.waiting import wait_until
from tests.support.wire.pictures import encoded, jpeg_scans, photo
from trocar_api.reasons import ErrorReason
from trocar_server.decoding.headers import read_header
from trocar_server.decoding.pixels import decode_image
from trocar_server.engine.execute import image_decoder
from trocar_server.engine.execute.image_decoder import SMALL_PIXELS, ImageDecoder
from trocar_server.errors import ServiceError

LIMIT = 50_000_000
LONG = jpeg_scans(4000, 4000, 30)
"""Takes more than a second."""
SMALL = encoded(photo(40, 60), "PNG")


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    found = ImageDecoder()
    yield found
    pids = found.pids
    found.stop()
    wait_until(lambda: not any(map(is_alive, pids)))


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may wait for whoever reads its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def start(decoder: ImageDecoder, data: bytes, flow: str = "") -> "asyncio.Task[object]":
    return asyncio.create_task(decoder.decode(data, read_header(data, LIMIT), LIMIT, flow))


async def until_it_decodes(decoder: ImageDecoder) -> None:
    await asyncio.to_thread(wait_until, lambda: bool(decoder.pids))


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
async def test_pixels_are_those_of_this_process(decoder: ImageDecoder, format_: str) -> None:
    data = encoded(photo(300, 410), format_)
    ours = await decoder.decode(data, read_header(data, LIMIT), LIMIT)
    assert ours.tobytes() == decode_image(data, LIMIT).tobytes()


async def test_a_process_is_used_again(decoder: ImageDecoder) -> None:
    await start(decoder, SMALL)
    first = decoder.pids
    await start(decoder, SMALL)
    assert decoder.pids == first
    assert len(first) == 1


async def test_errors_keep_their_reason_and_the_process_lives(decoder: ImageDecoder) -> None:
    await start(decoder, SMALL)
    first = decoder.pids
    with pytest.raises(ServiceError, match="damaged or cut off") as error:
        await start(decoder, SMALL[:-200])
    assert error.value.reason is ErrorReason.INVALID_IMAGE
    assert decoder.pids == first


async def test_a_cancel_kills_the_process_and_the_next_image_gets_another(decoder: ImageDecoder) -> None:
    decoding = start(decoder, LONG)
    await until_it_decodes(decoder)
    (pid,) = decoder.pids
    decoding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await decoding
    await asyncio.gather(*(start(decoder, SMALL) for _ in range(8)))
    assert pid not in decoder.pids
    assert not is_alive(pid)


async def test_an_image_that_takes_too_long_is_given_up(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_decoder, "MAX_DECODE_S", 0.2)
    with pytest.raises(ServiceError, match=r"takes longer than 0\.2 s") as error:
        await start(decoder, LONG)
    assert error.value.reason is ErrorReason.IMAGE_TOO_LARGE


async def test_a_process_that_dies_fails_its_image_alone(decoder: ImageDecoder) -> None:
    decoding = start(decoder, LONG)
    await until_it_decodes(decoder)
    os.kill(decoder.pids[0], signal.SIGKILL)
    with pytest.raises(ServiceError, match="ended the decoding process") as error:
        await decoding
    assert error.value.reason is ErrorReason.INVALID_IMAGE
    await start(decoder, SMALL)


async def test_a_process_that_died_idle_is_replaced(decoder: ImageDecoder) -> None:
    await start(decoder, SMALL)
    (pid,) = decoder.pids
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not is_alive(pid))
    await start(decoder, SMALL)
    assert decoder.pids != [pid]


async def test_a_process_whose_death_is_not_reported_yet_is_replaced(
    decoder: ImageDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reports the end of a process when its last thread is gone, a moment after its pipes are."""
    await start(decoder, SMALL)
    (pid,) = decoder.pids
    monkeypatch.setattr(subprocess.Popen, "poll", lambda _: None)
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: not is_alive(pid))
    await start(decoder, SMALL)
    assert decoder.pids != [pid]


async def test_small_images_do_not_wait_for_large_ones(decoder: ImageDecoder) -> None:
    assert read_header(LONG, LIMIT).scanned_pixels > SMALL_PIXELS
    large = [start(decoder, LONG, "mallory") for _ in range(8)]
    await asyncio.gather(*(start(decoder, SMALL, "alice") for _ in range(20)))
    assert sum(task.done() for task in large) < 8
    for task in large:
        task.cancel()
    await asyncio.gather(*large, return_exceptions=True)


async def test_callers_take_turns(decoder: ImageDecoder) -> None:
    ended: list[str] = []
    data = jpeg_scans(1600, 1600, 20)

    async def one(flow: str) -> None:
        await start(decoder, data, flow)
        ended.append(flow)

    await asyncio.gather(*(one("mallory") for _ in range(6)), one("alice"))
    assert ended.index("alice") < 5


async def test_a_stop_ends_what_decodes_and_what_waits(decoder: ImageDecoder) -> None:
    tasks = [start(decoder, LONG) for _ in range(6)]
    await until_it_decodes(decoder)
    decoder.stop()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(result, "reason", result) for result in results] == [ErrorReason.CANCELLED] * 6
    with pytest.raises(ServiceError):
        await start(decoder, SMALL)


async def test_a_thread_may_wait_for_an_image(decoder: ImageDecoder) -> None:
    decoder.attach()
    image = await asyncio.to_thread(decoder.decode_from_thread, SMALL, LIMIT, "alice")
    assert image.tobytes() == decode_image(SMALL, LIMIT).tobytes()


KILLED = """
import asyncio, os, signal
from tests.unit.engine.execute.test_image_decoder import LONG, ImageDecoder, start, until_it_decodes

async def main():
    decoder = ImageDecoder()
    task = start(decoder, LONG)
    await until_it_decodes(decoder)
    print(*decoder.pids, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_processes_end_with_a_server_that_is_killed() -> None:
    run = warm_python.run([sys.executable, "-c", KILLED], check=False, capture_output=True, text=True)
    assert run.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in run.stdout.split()]
    assert pids
    wait_until(lambda: not any(map(is_alive, pids)))


def test_decoding_needs_no_torch() -> None:
    code = "import sys, trocar_server.decoding.worker; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
