"""The state of a server as a scrape finds it."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trocar_server import cgroup_memory
from trocar_server.engine.generate.kept_caches import KeptCaches
from trocar_server.telemetry.labels import ModelLabels
from trocar_server.telemetry.snapshot import ServerState, disk_bytes


class Owner:
    """Keeps what it is asked to do."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.holder = None
        self.jobs: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> "Future[None]":
        self.jobs.append(work)
        return Future()


def state(owner: Owner) -> ServerState:
    engine: Any = SimpleNamespace(
        owner=owner, deployments={}, catalogue=SimpleNamespace(entries=list), caches=KeptCaches()
    )
    trainers: Any = SimpleNamespace(all=list)
    return ServerState(engine, trainers, Path(), ModelLabels(lambda _: ""))


def test_only_the_owner_thread_asks_for_the_devices_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def memory(of: object) -> int:
        threads.append(threading.current_thread().name)
        return 1 << 20

    monkeypatch.setattr(torch.cuda, "memory_allocated", memory)
    monkeypatch.setattr(torch.cuda, "memory_reserved", memory)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    found = state(owner := Owner("cuda:0"))
    found.read()
    assert found.device_bytes == {}
    (job,) = owner.jobs
    asked = threading.Thread(target=job, name="the owner")
    asked.start()
    asked.join()
    assert found.device_bytes == {"allocated": 1 << 20, "reserved": 1 << 20, "total": 1 << 30}
    assert set(threads) == {"the owner"}


def test_a_cpu_is_not_asked() -> None:
    found = state(owner := Owner("cpu"))
    found.read()
    assert owner.jobs == []


def test_a_disk_that_is_not_there_has_no_bytes(tmp_path: Path) -> None:
    assert disk_bytes(tmp_path / "absent") == {}
    there = disk_bytes(tmp_path)
    assert 0 < there["free"] <= there["total"]


@pytest.mark.parametrize("limit", [1 << 20, 1 << 59, None])
def test_a_containers_limit_counts_where_it_is_below_the_machines(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    monkeypatch.setattr(cgroup_memory, "cgroup_limit", lambda _: limit)
    assert cgroup_memory.memory_limit_bytes() == (limit if limit == 1 << 20 else machine)
