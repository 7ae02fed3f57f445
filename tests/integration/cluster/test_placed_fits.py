"""Data-parallel fits whose ranks Ray places on other nodes, against a plain script; a node that dies."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import trocar
from tests.support.models.trainable_nets import CLASSES, SHAPE, SteadyNet
from tests.support.oracles.ddp_training import Job, states_of, step_of_two_ranks
from tests.support.servers.ray_cluster import add_node, ray_cluster, write_config
from tests.support.servers.waiting import wait_until
from trocar.errors import FitInvalidError
from trocar_server.app.specs import model_spec
from trocar_server.auth import Scope, TokenFile
from trocar_server.config import ModelConfig, read_config
from trocar_server.models import load_model
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.ranks.data_parallel import DataParallel
from trocar_server.training.fit.ranks.placed_ranks import PlacedLauncher
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = [pytest.mark.timeout(1500), pytest.mark.filterwarnings("ignore")]

FACTORY = f"{SteadyNet.__module__}:{SteadyNet.__qualname__}"
MODELS: dict[str, Any] = {"steady": {"factory": FACTORY, "weights": "random:0"}}
PLACE = "cpus = 0.6"
"""One process on a node of one CPU: a rank is never on the node of its replica."""
COUNT, BATCH, EPOCHS = 22, 8, 3
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))  # of Ray's processes, too
        with ray_cluster(1) as found:
            yield found


@pytest.fixture(scope="module")
def client(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    """A client of one replica, which is on the head: other nodes come later."""
    from trocar_server.cluster import deploying

    folder = tmp_path_factory.mktemp("cluster")
    path = write_config(folder / "cluster.toml", MODELS, {"steady": PLACE}, start_timeout_s=120, drain_s=5)
    path.write_text(path.read_text().replace("[cluster]", f"input_shape = {list(SHAPE)}\n[cluster]", 1))
    token = TokenFile(folder / "data").add("ann", {Scope.RUN, Scope.TRAIN}, expires_at_s=None, now_s=0)[1]
    deploying.deploy(read_config(path))
    (address,) = deploying.wait_until_ready(read_config(path))
    with trocar.connect(address, token=str(token)) as connected:
        yield connected
    deploying.stop()


def samples(count: int, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    images = np.random.default_rng(seed).normal(size=(count, *SHAPE)).astype(np.float32)
    return images, np.arange(count) % CLASSES


def groups() -> list[str]:
    """States of Ray's placement groups that are not removed."""
    from ray.util import placement_group_table

    table: dict[str, Any] = placement_group_table()
    return [group["state"] for group in table.values() if group["state"] != "REMOVED"]


class Lines:
    """What a replica writes to its supervisor, given to the placement at once."""

    def __init__(self) -> None:
        self.take: Callable[[dict[str, Any]], None] = lambda line: None

    def write(self, *, ranks: dict[str, Any]) -> None:
        self.take(ranks)


def test_a_rank_is_placed_again_when_its_node_dies_and_every_step_counts_once(
    cluster: Any, tmp_path: Path
) -> None:
    from trocar_server.cluster.ranks.rank_placement import RankPlacement
    from trocar_server.cluster.ranks.rank_requests import RankRequests

    nodes = [add_node(cluster, resources={"other": 1})]
    given: dict[str, Any] = {"factory": FACTORY, "input_shape": list(SHAPE)}
    config = {"models": {"steady": given}, "device": "cpu", "data_dir": str(tmp_path), "host": HOST}
    base = load_model(model_spec("steady", ModelConfig(**given)), torch.device("cpu"), tmp_path)
    lines: Any = Lines()
    requests = RankRequests(lines, tmp_path)
    placement = RankPlacement(config, {"CPU": 1.0, "other": 1.0}, 300.0, requests.take)
    lines.take = placement.take
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    spec = TrainerSpec.model_validate(
        {"model_id": "steady", "optimizer": {"name": "sgd", "options": options}}
    )
    core = TrainerCore(base, spec, {}, tmp_path)
    parallel = DataParallel(core, base, {}, 2, PlacedLauncher(requests, HOST))
    model = SteadyNet().train()
    model.load_state_dict(base.module.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), **options)
    try:
        for number in range(3):
            images, labels = samples(BATCH, number)
            batch = torch.from_numpy(images), torch.from_numpy(labels)
            if number == 1:
                cluster.remove_node(nodes.pop(), allow_graceful=False)
                nodes.append(add_node(cluster, resources={"other": 1}))
            results = [parallel.step(Batch((batch[0],), {}, {"": batch[1]}, BATCH), PassGuard())]
            while results[-1] is None:
                results.append(parallel.step(Batch((batch[0],), {}, {"": batch[1]}, BATCH), PassGuard()))
            assert len(results) == (2 if number == 1 else 1)
            step_of_two_ranks(model, optimizer, *batch)
            found, expected = core.module.state_dict(), model.state_dict()
            assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
        assert groups() == ["CREATED"]
    finally:
        torch.set_num_threads(threads)
        parallel.close()
        placement.close()
        wait_until(lambda: groups() == [])
        cluster.remove_node(nodes.pop())


def test_a_fit_on_two_nodes_is_that_of_a_ddp_script(
    cluster: Any, client: trocar.Client, tmp_path: Path
) -> None:
    add_node(cluster)
    trainer = client.train("steady", optimizer=trocar.training.sgd(lr=0.1, momentum=0.9))
    model = SteadyNet()
    model.load_state_dict(load_file(trainer.export(tmp_path / "before.safetensors")))
    images, labels = samples(COUNT, 5)
    job = Job(model, torch.from_numpy(images), torch.from_numpy(labels), EPOCHS, BATCH, threads=1)
    expected = states_of(job, 2, tmp_path)

    number = trainer.start_fit((images, labels), epochs=EPOCHS, batch_size=BATCH, workers=2)
    events = list(trainer.watch(number))
    assert events[-1].kind == "finished", events[-1]
    assert [event.kind for event in events].count("step") == len(expected)
    found = load_file(trainer.export(tmp_path / "after.safetensors"))
    assert [name for name, value in expected[-1].items() if not torch.equal(value, found[name])] == []
    wait_until(lambda: groups() == [])


def test_more_workers_than_the_cluster_has_room_for_are_refused(client: trocar.Client) -> None:
    trainer = client.train("steady", optimizer=trocar.training.sgd(lr=0.1))
    with pytest.raises(FitInvalidError, match=r"the nodes of the cluster have room for 2, .* and not for 4"):
        trainer.fit(samples(COUNT, 5), batch_size=BATCH, workers=4)


def test_a_cluster_that_stays_full_is_told_with_what_was_free(cluster: Any) -> None:
    from trocar_server.cluster.ranks.rank_placement import RankPlacement

    told: list[dict[str, Any]] = []
    placement = RankPlacement({}, {"CPU": 1.0}, 0.5, told.append)
    try:
        placement.take({"place": "a", "count": 3, "address": "", "secret": "", "own_dir": ""})
        wait_until(lambda: any("ranks" in line for line in told))
        (line,) = (line["ranks"] for line in told if "ranks" in line)
        assert line["id"] == "a"
        assert line["no_room"].startswith("the cluster had no room for 3 more, each with 1 CPU on one node")
        wait_until(lambda: groups() == [])
    finally:
        placement.close()
