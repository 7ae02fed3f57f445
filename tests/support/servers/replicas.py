"""Servers of one model that share the folder of their trainers, as replicas of a cluster do."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.oracles.tiny_training import MODELS
from tests.support.servers.running_server import RunningServer, running_server
from trocar_server.training.files.owner_folders import OwnerFolders


class Replicas:
    """Servers that share the folder of their trainers."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.root, self._folder, self._stack = folder / "trainers", folder, stack
        self._names: dict[RunningServer, str] = {}

    def start(self, **options: Any) -> RunningServer:
        """Start one."""
        name = f"replica-{len(self._names)}"
        settings: dict[str, Any] = {"models": MODELS, "device": "cpu", "data_dir": self._folder / "data"}
        settings |= options
        settings.setdefault("own_dir", self._folder / name)
        server = self._stack.enter_context(running_server(owners=OwnerFolders(self.root, name), **settings))
        self._names[server] = name
        return server

    def lose(self, *, by: RunningServer) -> None:
        """Let a server believe that it is the only one left."""
        takeover = by.app.takeover
        assert takeover is not None
        takeover._gone_after_s = 0.0  # the time is Ray's business
        takeover._servers = {self._names[by]: True}
        by.run(takeover.look)
