"""What a server begins ends in reverse, when it stops and when its start fails at any step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.odd_models import Identity
from tests.support.servers.serving import custom
from trocar_server.app import app
from trocar_server.app.assembly import ReplicaSetup
from trocar_server.app.lifecycle import Lifecycle
from trocar_server.app.page_process import PageProcess
from trocar_server.config import ModelConfig, PageConfig, ServerConfig
from trocar_server.engine.compiled.variants import CompiledVariants
from trocar_server.engine.run.preparation import Preparation
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.rpc.server import RpcServer
from trocar_server.telemetry import Telemetry
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.takeover import Takeover
from trocar_server.training.trainers import Trainers

STEPS: list[tuple[Any, str, set[str]]] = [
    (StorageOnDemand, "get", {"device", "compiled", "preparation", "storage"}),
    (app, "open_telemetry", set()),
    (app, "start_server", {"telemetry"}),
    (Lifecycle, "begin", {"calls", "fits", "trainers"}),
    (RpcServer, "open_health_port", {"lifecycle"}),
    (PageProcess, "start", {"page"}),
    (app, "load_configured", set()),
    (Trainers, "start", set()),
    (Fits, "restore_all", set()),
    (Takeover, "start", set()),
    (Lifecycle, "set_loaded", {"takeover"}),
]
"""Steps of the start, in order, with the ends that were noted before."""
ENDS = {
    "device": (DeviceThread, "stop"),
    "compiled": (CompiledVariants, "stop"),
    "preparation": (Preparation, "stop"),
    "storage": (StorageOnDemand, "close"),
    "telemetry": (Telemetry, "stop"),
    "calls": (RpcServer, "stop"),
    "fits": (Fits, "stop"),
    "trainers": (Trainers, "stop"),
    "lifecycle": (Lifecycle, "stop"),
    "page": (PageProcess, "stop"),
    "takeover": (Takeover, "stop"),
}
ORDER = ["takeover", "page", "lifecycle", "calls", "fits", "trainers", "telemetry", "storage"]
ORDER += ["preparation", "compiled", "device"]
"""Of the last call of each end: the trainers close the storage, too."""


class StepFailedError(Exception):
    """A step of the start failed."""


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ends that are called, in order."""
    names: list[str] = []

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            names.append(name)
            return real(*given, **named)

        return call

    async def page_start(self: PageProcess, log: Any) -> None:
        """Start no process: its folder is what has to end."""

    monkeypatch.setattr(PageProcess, "start", page_start)
    for name, (owner, method) in ENDS.items():
        monkeypatch.setattr(owner, method, noted(name, getattr(owner, method)))
    return names


def in_order(names: list[str]) -> list[str]:
    """Return each name once, where it stands last."""
    return list(dict.fromkeys(reversed(names)))[::-1]


def started(folder: Path) -> Any:
    config = ServerConfig(
        port=0,
        health_port=0,
        device="cpu",
        grace_s=1.0,
        data_dir=folder / "data",
        models={"m": ModelConfig(**custom(Identity))},
        page=PageConfig(enabled=True, port=0),
    )
    setup = ReplicaSetup(own_dir=folder / "own", owners=OwnerFolders(folder / "trainers", "a"))
    return app.start(config, is_alone=True, setup=setup)


async def test_a_stop_ends_everything_in_reverse(tmp_path: Path, ended: list[str]) -> None:
    running = await started(tmp_path)
    assert ended == []
    await running.stop()
    assert in_order(ended) == ORDER
    count = len(ended)
    await running.stop()
    assert len(ended) == count


@pytest.mark.parametrize("index", range(len(STEPS)), ids=[f"{method}" for _, method, _ in STEPS])
async def test_a_start_that_fails_ends_what_has_begun(
    tmp_path: Path, ended: list[str], index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any, **named: Any) -> Any:
        raise StepFailedError

    monkeypatch.setattr(*STEPS[index][:2], fail)
    with pytest.raises(StepFailedError):
        await started(tmp_path)
    begun = set[str]().union(*(names for _, _, names in STEPS[: index + 1]))
    assert in_order(ended) == [name for name in ORDER if name in begun]
