"""Fixtures of the engine's parts without a server."""

from collections.abc import Iterator

import pytest
import torch

from trocar_server.engine.schedule.device import DeviceThread


@pytest.fixture
def owner() -> Iterator[DeviceThread]:
    """The thread that owns torch, started."""
    thread = DeviceThread(torch.device("cpu"))
    thread.start()
    yield thread
    thread.stop()
