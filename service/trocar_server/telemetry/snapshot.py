"""Snapshot of a server's state: taken on its event loop, read by scrapes."""

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trocar_server import __version__
from trocar_server.engine.engine import Engine
from trocar_server.engine.status import device_of, queue_of
from trocar_server.telemetry.labels import TRAINER, ModelLabels
from trocar_server.training.trainers import Trainers


@dataclass(frozen=True)
class Replicas:
    """The replicas of one model."""

    count: int = 0
    leased: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class Snapshot:
    """State of a server.

    Attributes:
        models: Number of catalogue models by state.
        replicas: By label value of the model.
        trainers: By state.
        recorded: Recorded passes by label value of the model.
        held: Seconds for which the work that runs now has held the device, by label value of the model.
        over_limit: Label values of models whose work is over `max_pass_s`.
        cache_count: Texts that have keys and values in memory.
        cache_bytes: Bytes that these take when the most tokens have been generated.
    """

    models: Mapping[str, int]
    replicas: Mapping[str, Replicas]
    trainers: Mapping[str, int]
    recorded: Mapping[str, int]
    held: Mapping[str, float]
    over_limit: Mapping[str, int]
    cache_count: int
    cache_bytes: int


@dataclass(frozen=True)
class Build:
    """Constants of a running server."""

    version: str
    torch_version: str
    device: str


@dataclass
class ServerState:
    """Reads a server's state. Its methods belong to the event loop.

    Attributes:
        device_bytes: Memory of a GPU at the last scrape: allocated and reserved by this process, and in
            total.
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
        """Current state."""
        self._ask_device()
        return Snapshot(
            Counter(entry.state.lower() for entry in self.engine.catalogue.entries()),
            self._replicas(),
            Counter(trainer.state for trainer in self.trainers.all()),
            self._recorded(),
            *self._held(),
            self.engine.caches.count,
            self.engine.caches.byte_count,
        )

    def _held(self) -> tuple[dict[str, float], dict[str, int]]:
        device = device_of(self.engine)
        label = self.labels.of(device.user) or TRAINER
        if not device.user:
            return {}, {}
        return {label: device.held_s}, {label: int(device.is_over_limit)}

    def _recorded(self) -> dict[str, int]:
        result: Counter[str] = Counter()
        for model_id, deployment in self.engine.deployments.items():
            result[self.labels.of(model_id) or TRAINER] += deployment.recorded_count
        return dict(result)

    def _replicas(self) -> dict[str, Replicas]:
        result: dict[str, Replicas] = {}
        for model_id in self.engine.deployments:
            queue = queue_of(self.engine, model_id)
            label = self.labels.of(model_id) or TRAINER
            old = result.get(label, Replicas())
            result[label] = Replicas(
                old.count + queue.replica_count,
                old.leased + queue.leased_count,
                old.waiting + queue.waiting_count,
            )
        return result

    def _ask_device(self) -> None:
        """Let the owner thread of torch read the device's memory for the next scrape."""
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
    """Total and free bytes of the disk that a folder is on; nothing if they cannot be read.

    Not on the event loop: a network disk can be slow.
    """
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return {}
    return {"total": usage.total, "free": usage.free}
