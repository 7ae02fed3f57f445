"""Machine checks: device, memory, open files, clock."""

import os
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from trocar_server.cgroup_memory import cgroup_limit
from trocar_server.config import ServerConfig
from trocar_server.doctor.finding import Finding, fail, ok, warn
from trocar_server.engine.schedule.device import choose_device
from trocar_server.errors import ServiceError

_SHARED = Path("/dev/shm")
_FEW_FILES = 4096
_LITTLE_MEMORY = 2 << 30
_LITTLE_SHARED = 64 << 20
_EARLIEST_S = 1_767_225_600  # 2026-01-01: before this release was made


def check_device(config: ServerConfig) -> Iterator[Finding]:
    """Check that the configured device is there, and can compute."""
    try:
        device = choose_device(config.device)
        (torch.ones(8, device=device) * 2).sum().item()
    except ServiceError as error:
        yield fail("device", error.message, 'set device = "cpu", or repair the driver and try nvidia-smi')
        return
    except Exception as error:  # noqa: BLE001 - whatever a driver makes of it
        line = str(error).splitlines()[0][:200]
        yield fail(
            "device",
            f"'{config.device}' cannot run a test computation: {line}",
            "check the driver: nvidia-smi",
        )
        return
    threads = config.threads or torch.get_num_threads()
    cores = _cores()
    yield ok("device", f"{device}, {threads} threads on {cores} cores")
    if device.type == "cpu" and threads > cores:
        yield warn("threads", f"{threads} threads on {cores} cores", f"set threads = {cores}")


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def check_memory(config: ServerConfig) -> Iterator[Finding]:
    """Check how much memory the process may have: the machine's, or its cgroup's."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit()
    whose, most = ("the machine's", total) if limit is None or limit >= total else ("the cgroup's", limit)
    text = f"{most / 2**30:.1f} GiB ({whose})"
    if most < _LITTLE_MEMORY:
        advice = "a server takes 0.7 GiB before its models and passes; give it 2 GiB or more"
        yield warn("memory", text, advice)
    else:
        yield ok("memory", text)
    if config.limits.max_pass_bytes > most:
        yield warn(
            "memory of a pass",
            f"limits.max_pass_bytes is {config.limits.max_pass_bytes / 2**30:.1f} GiB, more than the "
            "memory available",
            "remove the setting: the server then uses three quarters of the memory",
        )


def check_shared_memory(config: ServerConfig) -> Iterator[Finding]:
    """Check the room in /dev/shm."""
    if not _SHARED.is_dir():
        yield warn(
            "/dev/shm", "not there", "clients on this machine send over the socket; mount a tmpfs there"
        )
        return
    free = shutil.disk_usage(_SHARED).free
    text = f"{free / 2**20:.0f} MiB free"
    if free < _LITTLE_SHARED:
        yield warn("/dev/shm", text, "give the container more: docker run --shm-size 1g")
    else:
        yield ok("/dev/shm", text)


def check_open_files(config: ServerConfig) -> Iterator[Finding]:
    """Check how many files and connections the process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = "unlimited" if soft == resource.RLIM_INFINITY else f"{soft} (at most {hard})"
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        yield warn("open files", text, f"ulimit -n {_FEW_FILES}, or LimitNOFILE= in the systemd unit")
    else:
        yield ok("open files", text)


def check_clock(config: ServerConfig) -> Iterator[Finding]:
    """Check that the clock has been set: tokens and certificates expire by it."""
    now = time.time()
    text = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    if now < _EARLIEST_S:
        yield fail(
            "clock",
            f"it says {text}",
            "correct the clock (timedatectl): tokens and certificates expire by it",
        )
    else:
        yield ok("clock", text)
