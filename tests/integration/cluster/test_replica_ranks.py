"""A replica whose fit has workers, and the processes of these; a test in place of Ray. It needs no Ray."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import trocar
from tests.support import ROOT
from tests.support.models.trainable_nets import CLASSES, SHAPE, SteadyNet
from tests.support.oracles.ddp_training import step_of_two_ranks
from tests.support.servers import warm_python
from trocar.errors import FitInvalidError
from trocar_server.cluster.child_process import ChildProcess, Line

FACTORY = f"{SteadyNet.__module__}:{SteadyNet.__qualname__}"
HOST, SEED = "127.0.0.1", 7
COUNT, BATCH, EPOCHS = 16, 8, 2
STOP_S = 60.0


class Supervisor:
    """What a supervisor does for a replica, with child processes in place of actors."""

    def __init__(self, folder: Path) -> None:
        model = {"factory": FACTORY, "input_shape": list(SHAPE)}
        self._config = {
            "models": {"steady": model},
            "data_dir": str(folder),
            "device": "cpu",
            "threads": 1,
            "host": HOST,
            "port": 0,
        }
        settings = {"model_id": "steady", "replica_id": "one", "key": "", "drain_s": 1.0}
        self.ranks: dict[str, list[ChildProcess]] = {}
        self.placed_count = 0
        settings |= {"config": self._config}
        self.replica = ChildProcess("trocar_server.cluster.replica_server", settings, self._take)

    def stop(self) -> None:
        self.replica.stop(STOP_S)
        for own_id in tuple(self.ranks):
            self._release(own_id)

    def _take(self, line: Line) -> None:
        request = line.get("ranks", {})
        if "release" in request:
            self._release(request["release"])
        elif request:
            self.placed_count += request["count"]
            shared = {name: request[name] for name in ("address", "secret", "own_dir")}
            settings = [shared | {"config": self._config, "rank": 1 + i} for i in range(request["count"])]
            self.ranks[request["place"]] = [
                ChildProcess("trocar_server.cluster.ranks.rank_server", one, lambda line: None)
                for one in settings
            ]

    def _release(self, own_id: str) -> None:
        for rank in self.ranks.pop(own_id):
            rank.stop(STOP_S)


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setattr(ChildProcess, "starts", warm_python.Popen)  # torch is imported once for all of them
    made = Supervisor(tmp_path / "data")
    yield made
    made.stop()


def test_a_fit_of_a_replica_is_that_of_two_ranks_and_leaves_none(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    images = np.random.default_rng(5).normal(size=(COUNT, *SHAPE)).astype(np.float32)
    labels = np.arange(COUNT) % CLASSES
    supervisor.replica.send({"rank_capacity": 2})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with trocar.connect(supervisor.replica.wait_ready()) as client:
            trainer = client.train("steady", optimizer=trocar.training.sgd(lr=0.1, momentum=0.9), seed=SEED)
            model = SteadyNet().train()
            model.load_state_dict(load_file(trainer.export(tmp_path / "before.safetensors")))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            trainer.fit((images, labels), epochs=EPOCHS, batch_size=BATCH, workers=2)
            for epoch in range(EPOCHS):
                order = torch.randperm(COUNT, generator=torch.Generator().manual_seed(SEED + epoch))
                for indices in order.split(BATCH):
                    batch = torch.from_numpy(images)[indices], torch.from_numpy(labels)[indices]
                    step_of_two_ranks(model, optimizer, *batch)
            found = load_file(trainer.export(tmp_path / "after.safetensors"))
            expected = model.state_dict()
            assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
            with pytest.raises(FitInvalidError, match=r"have room for 2, .* and not for 4"):
                trainer.fit((images, labels), batch_size=BATCH, workers=4)
    finally:
        torch.set_num_threads(threads)
    assert supervisor.placed_count == 1
