"""Images that are small, and become large or take long: bounded, ended by deadlines, nobody else's loss."""

import io
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support.servers.server_processes import ServerProcess, ServerProcesses, server_processes
from tests.support.servers.waiting import wait_until
from tests.support.wire.pictures import encoded, jpeg_scans, photo

LONG = jpeg_scans(2300, 2300, 100)
"""Near the most work that is allowed for one image, half a second or more: 30 KB."""
GROWTH_BYTES = 32 << 20
MODELS = {"resnet18": {"weights": "random:0"}, "lraspp_mobilenet_v3_large": {"weights": "random:0"}}


def strip(kind: str, width: int, height: int, seed: int) -> bytes:
    colour = np.random.default_rng(seed).integers(0, 256, 3).tolist()
    return encoded(Image.new("RGB", (width, height), tuple(colour)), kind)


EXTREMES = {
    f"{kind} {width} x {height}": strip(kind, width, height, width + height)
    for kind, most in (("PNG", 60_000), ("JPEG", 60_000), ("WEBP", 16_000))
    for width, height in ((1, most), (most - 77, 2))
}
SCANS = {f"{count} scans": jpeg_scans(512, 384, count) for count in (101, 3_000, 10_000)}


@pytest.fixture(scope="module")
def processes() -> Iterator[ServerProcesses]:
    with server_processes() as found:
        yield found


@pytest.fixture
def server(processes: ServerProcesses, tmp_path: Path) -> Iterator[ServerProcess]:
    found = processes.start(tmp_path, models=MODELS, grace_s=2.0)
    with trocar.connect(found.address) as client:
        for model_id in MODELS:  # whatever is kept for later is there
            client.extract(model_id, [photo(), encoded(photo(), "PNG")], taps="/in")
    yield found
    assert found.terminate() == 0


def resident_bytes(server: ServerProcess, field: str = "VmRSS") -> int:
    lines = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def children(server: ServerProcess) -> list[int]:
    """Return the ids of the processes that a server has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == server.pid and state != "Z":
            found.append(int(path.parent.name))
    return found


def reset_peak(server: ServerProcess) -> int:
    """Let the kernel forget the most memory that a server had; return what it has now."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5")
    return resident_bytes(server)


@pytest.mark.reliability
def test_extreme_proportions_are_prepared_in_little_memory_or_refused(server: ServerProcess) -> None:
    with trocar.connect(server.address, timeout_s=60) as client:
        for name, data in EXTREMES.items():
            before = reset_peak(server)
            assert client.extract("resnet18", data, taps="/in")["/in"].shape == (1, 3, 224, 224)
            with pytest.raises(trocar.errors.ImageTooLargeError, match="would become"):
                client.extract("lraspp_mobilenet_v3_large", data, taps="/in")
            growth = resident_bytes(server, "VmHWM") - before
            print(f"{name}: {len(data):,} bytes, {growth / 2**20:.1f} MiB more")
            assert growth < GROWTH_BYTES, name


@pytest.mark.reliability
def test_many_scans_are_refused_before_anything_is_decoded(server: ServerProcess) -> None:
    with trocar.connect(server.address, timeout_s=60) as client:
        before, pids = reset_peak(server), children(server)
        for name, data in SCANS.items():
            started = time.perf_counter()
            with pytest.raises(trocar.errors.ImageTooLargeError, match="scans"):
                client.extract("resnet18", data, taps="fc")
            print(f"{name}, {len(data):,} bytes: refused in {1e3 * (time.perf_counter() - started):.0f} ms")
        assert resident_bytes(server, "VmHWM") - before < GROWTH_BYTES
        assert children(server) == pids


@pytest.mark.reliability
def test_a_deadline_ends_the_decoding(server: ServerProcess) -> None:
    # A few may be decoded in time, 16 MiB each; all of them would be 384 MiB.
    before = reset_peak(server)
    with trocar.connect(server.address, timeout_s=0.3) as client:
        started = time.perf_counter()
        with pytest.raises(trocar.errors.DeadlineExceededError):
            client.extract("resnet18", [LONG] * 24, taps="fc")
        ended = time.perf_counter()
    # Idle processes use no time; the one of the image is gone, or has not been started again.
    wait_until(lambda: not any(is_working(pid) for pid in children(server)))
    print(f"stopped {1e3 * (time.perf_counter() - ended):.0f} ms after {ended - started:.2f} s")
    assert resident_bytes(server, "VmHWM") - before < 4 * GROWTH_BYTES


def is_working(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    except OSError:
        return False


@pytest.mark.reliability
def test_others_are_served_while_eight_callers_send_work_for_seconds(server: ServerProcess) -> None:
    def bomb() -> None:
        with trocar.connect(server.address, timeout_s=20) as client, suppress(trocar.TrocarError):
            client.extract("resnet18", [LONG] * 24, taps="fc")

    callers = [threading.Thread(target=bomb) for _ in range(8)]
    with trocar.connect(server.address, timeout_s=120) as client:
        expected = client.extract("resnet18", encoded(photo(), "JPEG"), taps="fc")["fc"]
        for caller in callers:
            caller.start()
        wait_until(lambda: any(is_working(pid) for pid in children(server)))
        times = []
        for _ in range(5):
            started = time.perf_counter()
            assert client.models()
            health = time.perf_counter()
            assert np.array_equal(
                client.extract("resnet18", encoded(photo(), "JPEG"), taps="fc")["fc"], expected
            )
            times.append((health - started, time.perf_counter() - health))
        still = sum(caller.is_alive() for caller in callers)
        look_s, image_s = (max(column) for column in zip(*times, strict=True))
        print(f"look {look_s:.3f} s, image {image_s:.3f} s, {still} of 8 others at work")
        assert still
    for caller in callers:
        caller.join()


@pytest.mark.reliability
def test_sigterm_ends_within_the_grace_while_images_decode(
    processes: ServerProcesses, tmp_path: Path
) -> None:
    server = processes.start(tmp_path, models={"resnet18": {"weights": "random:0"}}, grace_s=1.0)
    with trocar.connect(server.address, timeout_s=60) as client:
        caller = threading.Thread(target=lambda: quietly(client))
        caller.start()
        wait_until(lambda: bool(children(server)))
        pids = children(server)
        started = time.perf_counter()
        assert server.terminate() == 0
        print(f"ended in {time.perf_counter() - started:.2f} s")
        caller.join()
    wait_until(lambda: not any(map(is_working, pids)))


def quietly(client: trocar.Client) -> None:
    with suppress(trocar.TrocarError):
        client.extract("resnet18", [LONG] * 24, taps="fc")


@pytest.mark.reliability
def test_decoders_end_with_a_server_that_is_killed(processes: ServerProcesses, tmp_path: Path) -> None:
    server = processes.start(tmp_path, models={"resnet18": {"weights": "random:0"}})
    with trocar.connect(server.address, timeout_s=5) as client:
        caller = threading.Thread(target=lambda: quietly(client))
        caller.start()
        wait_until(lambda: bool(children(server)))
        pids = children(server)
        server.kill()
        caller.join()
    wait_until(lambda: not any(is_working(pid) for pid in pids))


def test_a_picture_of_sixteen_bits_is_the_same_however_it_is_sent(
    server: ServerProcess, tmp_path: Path
) -> None:
    image = Image.fromarray(np.random.default_rng(5).integers(0, 1 << 16, (90, 120)).astype(np.uint16))
    exif = Image.Exif()
    exif[0x0112] = 8
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    path = tmp_path / "cells.png"
    path.write_bytes(file.getvalue())
    with trocar.connect(server.address) as client:
        ways: list[Any] = [path, file.getvalue(), Image.open(path)]
        maps = [client.extract("resnet18", way, taps="layer4")["layer4"] for way in ways]
    assert all(np.array_equal(found, maps[0]) for found in maps)
