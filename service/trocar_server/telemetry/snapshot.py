"""The state of a server at one moment: read on its event loop, shown by whoever scrapes it."""

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trocar_server import __version__
from trocar_server.engine.engine import Engine
from trocar_server.telemetry.labels import TRAINER, ModelLabels
from trocar_server.training.trainers import Trainers

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Where Linux says what a container may use: cgroups of version 2, and of version 1."""


@dataclass(frozen=True)
class Replicas:
    """The replicas of one model."""

    count: int = 0
    leased: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What a server holds now.

    Attributes:
        models: Models of the catalogue by state.
        replicas: By label value of the model.
        trainers: By state.
    """

    models: Mapping[str, int]
    replicas: Mapping[str, Replicas]
    trainers: Mapping[str, int]


@dataclass(frozen=True)
class Build:
    """What never changes while a server runs."""

    version: str
    torch_version: str
    device: str


@dataclass
class ServerState:
    """Reads a server's state. Its methods belong to the event loop.

    Attributes:
        device_bytes: Of a GPU when somebody last asked: allocated and reserved by this process, and in total.
    """

    engine: Engine
    trainers: Trainers
    data_dir: Path
    labels: ModelLabels
    device_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def build(self) -> Build:
        """Versions and the device."""
        return Build(__version__, torch.__version__, str(self.engine.owner.device))

    def read(self) -> Snapshot:
        """Return the state of now."""
        self._ask_device()
        return Snapshot(
            Counter(entry.state.lower() for entry in self.engine.catalogue.entries()),
            self._replicas(),
            Counter(trainer.state.value.lower() for trainer in self.trainers.all()),
        )

    def _replicas(self) -> dict[str, Replicas]:
        found: dict[str, Replicas] = {}
        for model_id, pool in self.engine.pools().items():
            label = self.labels.of(model_id) or TRAINER
            old = found.get(label, Replicas())
            found[label] = Replicas(
                old.count + pool.count, old.leased + pool.leased_count, old.waiting + pool.waiting_count
            )
        return found

    def _ask_device(self) -> None:
        """Have the owner thread, which alone calls torch, read the device's memory for the next scrape."""
        device = self.engine.owner.device
        if device.type != "cuda":
            return

        def read() -> None:
            self.device_bytes = {
                "allocated": torch.cuda.memory_allocated(device),
                "reserved": torch.cuda.memory_reserved(device),
                "total": torch.cuda.get_device_properties(device).total_memory,
            }

        self.engine.owner.submit(read).add_done_callback(lambda done: done.exception())


def disk_bytes(folder: Path) -> dict[str, int]:
    """Return the bytes of the disk that a folder is on, all and free ones; nothing where it cannot be asked.

    Not on the event loop: a disk over the network can take its time.
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"total": usage.total, "free": usage.free}


def memory_limit_bytes(files: Sequence[Path] = _CGROUP_LIMITS) -> int:
    """Return the most memory that this process may use: the container's limit, or the machine's memory."""
    limit = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for file in files:
        with suppress(OSError, ValueError):  # there is no such file, or it says `max`
            limit = min(limit, int(file.read_text()))
    return limit
