"""A placer that starts ranks as processes of this machine, as Ray does on nodes; for tests."""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from tests.support.models.trainable_nets import SteadyNet
from tests.support.servers import warm_python
from tests.unit.training.trainers import tiny
from trocar_server.models import HostedModel
from trocar_server.training.fit.ranks.placed_ranks import serve_rank

HOST = "127.0.0.1"


class WideNet(SteadyNet):
    """One of another version: its head has another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 6)


def load(model_id: str) -> HostedModel:
    """Build a model of other random weights than rank 0's, so that what is not sent is seen."""
    torch.manual_seed(99)
    return tiny(WideNet if model_id == "wide" else SteadyNet)


class LocalPlacer:
    """Starts ranks as processes; see `Placer`.

    Args:
        model_id: What they load.
    """

    def __init__(self, model_id: str = "") -> None:
        self.capacity: int | None = None
        self.refusal = ""
        self.launches: dict[str, list[warm_python.Popen]] = {}
        self.secrets: list[str] = []
        self._model_id = model_id

    @property
    def process_ids(self) -> list[int]:
        """Of every rank that runs."""
        return [rank.pid for ranks in self.launches.values() for rank in ranks]

    def place(self, own_id: str, count: int, address: str, secret: str) -> None:
        self.secrets.append(secret)
        self.launches[own_id] = []
        if self.refusal:
            return
        for rank in range(1, count + 1):
            settings = json.dumps([address, secret, rank, self._model_id])
            code = f"from {__name__} import main; main()"
            command = [sys.executable, "-c", code, settings]
            self.launches[own_id].append(warm_python.Popen(command))

    def no_room(self, own_id: str) -> str:
        return self.refusal

    def why_lost(self, own_id: str) -> str:
        ended = [rank.pid for rank in self.launches.get(own_id, ()) if rank.poll() is not None]
        return f"process {ended[0]} ended" if ended else ""

    def release(self, own_id: str) -> None:
        for rank in self.launches.pop(own_id):
            rank.kill()
            rank.wait()


def main() -> None:
    """Be a rank; the argument has its settings."""
    address, secret, rank, model_id = json.loads(sys.argv[1])
    with TemporaryDirectory() as folder:
        serve_rank(address, secret, rank, HOST, Path(folder), lambda name: load(model_id or name))
