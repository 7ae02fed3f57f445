"""The service on a Ray cluster of two simulated nodes: gateways, replicas, faults, scaling and errors."""

import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.servers.ray_cluster import command, ray_nodes, write_config
from tests.support.servers.serving import Serve
from tests.support.servers.waiting import wait_until
from trocar.errors import TokenInvalidError, TokenMissingError, UnknownModelError
from trocar_server.config import read_config
from trocar_server.errors import ServiceError

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = [
    pytest.mark.timeout(600),  # of which the start of two nodes takes minutes on a busy machine
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]

MODELS = {"tiny": {"architecture": "squeezenet1_1", "weights": "random:0"}}
PLACE = "cpus = 0.5"
SETTINGS = {
    "start_timeout_s": 400,
    "upscale_delay_s": 1,
    "downscale_delay_s": 1,
    "drain_s": 20,
    "hold_s": 200,
}
PATIENCE_S = 300.0
"""Of callers: on a busy machine a new replica takes more than the minute of a usual call."""
IMAGES = np.random.default_rng(0).normal(size=(2, 3, 64, 64)).astype(np.float32)
TAPS = ["features.0", "features.3", "classifier"]


@dataclass
class Deployed:
    """A deployment with one model."""

    address: str
    config: Path
    token: str

    @property
    def gateways(self) -> list[str]:
        """The addresses of the gateways that are there now: a replaced one listens on another port."""
        return sorted(report["address"] for report in self.reports("gateways"))

    def connect(self, index: int = 0, **options: Any) -> trocar.Client:
        return trocar.connect(self.gateways[index], token=self.token, timeout_s=PATIENCE_S, **options)

    def replicas(self) -> list[dict[str, Any]]:
        return self.reports("replicas")

    def reports(self, kind: str) -> list[dict[str, Any]]:
        import ray

        from trocar_server.cluster.directory import open_directory

        state: Any = ray.get(open_directory().state.remote())
        found: list[dict[str, Any]] = state[kind]
        return found

    def scale(self, count: int) -> None:
        from trocar_server.cluster import deploying

        deploying.scale("tiny", count, count)
        wait_until(lambda: len(self.replicas()) == count)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    from trocar_server.auth import Scope, TokenFile

    folder = tmp_path_factory.mktemp("cluster")
    config = write_config(folder / "cluster.toml", MODELS, {"tiny": PLACE}, **SETTINGS)
    token = TokenFile(folder / "data").add("ann", {Scope.RUN, Scope.TRAIN}, expires_at_s=None, now_s=0)[1]
    with ray_nodes(2) as address:
        from trocar_server.cluster import deploying

        deploying.deploy(read_config(config))
        deploying.wait_until_ready(read_config(config))
        yield Deployed(address, config, str(token))
        deploying.stop()
        with pytest.raises(ServiceError, match="not deployed"):
            deploying.deployed()
        again = command("cluster", "stop", "--ray", address)
        assert again.returncode == 1
        assert again.stderr.startswith("error: Trocar is not deployed on this cluster")


@dataclass
class Load:
    """Calls of three threads."""

    call_count: int = 0
    failures: list[Exception] = field(default_factory=list)

    def grows(self) -> None:
        """Wait for ten more calls."""
        before = self.call_count
        wait_until(lambda: self.call_count > before + 10 or bool(self.failures))


@contextmanager
def under_load(cluster: Deployed) -> Iterator[Load]:
    load, stopped = Load(), threading.Event()

    def work(client: trocar.Client) -> None:
        while not stopped.is_set():
            try:
                client.extract("tiny", IMAGES[:1], ["features.0"])
                load.call_count += 1
            except trocar.TrocarError as error:
                load.failures.append(error)
                return

    # Without the client's own retries: what fails is seen.
    with cluster.connect(retries=0) as client:
        threads = [threading.Thread(target=work, args=(client,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        try:
            yield load
            load.grows()
        finally:
            stopped.set()
            for thread in threads:
                thread.join()


def direct(serve: Serve, weights: str = MODELS["tiny"]["weights"]) -> trocar.Client:
    models = {"tiny": {**MODELS["tiny"], "weights": weights}}
    return trocar.connect(serve(models=models, threads=1).address)


def test_every_gateway_gives_the_bits_of_a_server(cluster: Deployed, serve: Serve) -> None:
    assert len(cluster.gateways) == 2
    with direct(serve) as client:
        expected = client.extract("tiny", IMAGES, TAPS)
    for index in range(2):
        with cluster.connect(index) as client:
            found = client.extract("tiny", IMAGES, TAPS)
            assert list(found) == list(expected)
            assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_lists_and_errors_are_those_of_a_server(cluster: Deployed) -> None:
    with cluster.connect() as client:
        assert [model.model_id for model in client.models()] == ["tiny"]
        with pytest.raises(UnknownModelError, match="nearest: tiny"):
            client.extract("tini", IMAGES, TAPS)
        with pytest.raises(trocar.TrocarError, match="cluster has no Drain"):
            client.drain()


def test_a_token_that_may_not_is_refused(cluster: Deployed) -> None:
    with trocar.connect(cluster.gateways[0]) as client, pytest.raises(TokenMissingError):
        client.extract("tiny", IMAGES, TAPS)
    with trocar.connect(cluster.gateways[0], token="trocar_" + "A" * 43) as client:
        with pytest.raises(TokenInvalidError):
            client.extract("tiny", IMAGES, TAPS)
        with pytest.raises(TokenInvalidError):
            client.models()


def test_a_stream_goes_through(cluster: Deployed) -> None:
    with cluster.connect() as client:
        batches = [IMAGES + index for index in range(5)]
        with client.extract_stream("tiny", iter(batches), ["features.3"]) as stream:
            results = [result.unwrap()["features.3"] for result in stream]
        alone = [client.extract("tiny", batch, ["features.3"])["features.3"] for batch in batches]
    assert all(np.array_equal(*pair) for pair in zip(results, alone, strict=True))


def test_a_trainer_is_found_through_every_gateway(cluster: Deployed, serve: Serve) -> None:
    labels = np.array([3, 1])

    def losses(first: trocar.Client, second: trocar.Client) -> list[float]:
        trainer = first.train("tiny", trainable=["classifier"], optimizer=trocar.training.sgd(lr=0.01))
        again = second.trainer(trainer.trainer_id)
        return [trainer.step(IMAGES, labels).loss, again.step(IMAGES, labels).loss]

    with direct(serve) as client:
        expected = losses(client, client)
    with cluster.connect(0) as first, cluster.connect(1) as second:
        assert losses(first, second) == expected
        assert len(first.trainers()) == 1


def test_the_same_configuration_again_replaces_no_replica(cluster: Deployed) -> None:
    before = {replica["replica_id"] for replica in cluster.replicas()}
    ended = command("serve", "--config", str(cluster.config), "--ray", cluster.address)
    assert (ended.returncode, "trocar is ready on 127.0.0.1:" in ended.stdout) == (0, True), ended.stderr
    shown = command("cluster", "status", "--json", "--ray", cluster.address)
    state = json.loads(shown.stdout.splitlines()[-1])
    assert {replica["replica_id"] for replica in state["replicas"]} == before
    assert sorted(gateway["address"] for gateway in state["gateways"]) == cluster.gateways


def test_resources_that_no_node_has_are_refused(cluster: Deployed) -> None:
    from trocar_server.cluster import deploying

    config = write_config(cluster.config.with_name("other.toml"), MODELS, {"tiny": "gpus = 4"}, **SETTINGS)
    with pytest.raises(ServiceError, match=r"needs 1 CPU, 4 GPU on one node, .* is 1 CPU, 0 GPU"):
        deploying.deploy(read_config(config))


def test_an_address_without_ray_is_refused() -> None:
    ended = command("cluster", "status", "--ray", "127.0.0.1:1")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: no Ray cluster answers at '127.0.0.1:1'")
    assert len(ended.stderr.splitlines()) == 1


def test_a_replica_that_cannot_start_says_why(cluster: Deployed) -> None:
    from trocar_server.cluster import deploying

    broken = {**MODELS, "broken": {"architecture": "squeezenet1_1", "weights": "missing.safetensors"}}
    places = {"tiny": PLACE, "broken": PLACE}
    config = read_config(write_config(cluster.config.with_name("broken.toml"), broken, places, **SETTINGS))
    deploying.deploy(config)
    with pytest.raises(ServiceError, match=r"a replica of 'broken' cannot start: .*missing\.safetensors"):
        deploying.wait_until_ready(config)
    told = command("cluster", "status", "--ray", cluster.address).stdout
    assert re.search(r"could not start, the last one: .*missing\.safetensors", told), told
    with cluster.connect() as client:  # and the others go on
        assert client.extract("tiny", IMAGES, TAPS)


def test_a_replica_that_is_never_ready_ends_the_wait(cluster: Deployed) -> None:
    from trocar_server.cluster import deploying

    models = {**MODELS, "second": {"architecture": "squeezenet1_1", "weights": "random:1"}}
    places = {"tiny": PLACE, "second": "cpus = 1\nmin_replicas = 9"}
    settings = {**SETTINGS, "start_timeout_s": 3}
    config = read_config(write_config(cluster.config.with_name("nine.toml"), models, places, **settings))
    deploying.deploy(config)
    with pytest.raises(ServiceError, match=r"not ready after 3 s: \d of 9 replicas of 'second' are ready"):
        deploying.wait_until_ready(config)
    deploying.deploy(read_config(cluster.config))
    deploying.wait_until_ready(read_config(cluster.config))


def test_a_folder_that_cannot_be_written_is_named(cluster: Deployed) -> None:
    from trocar_server.cluster import deploying

    config = read_config(cluster.config)
    missing = cluster.config / "below a file"
    shared = config.cluster.model_copy(update={"trainers_dir": missing})
    for changed in ({"data_dir": missing}, {"cluster": shared}):
        with pytest.raises(ServiceError, match=r"(data_dir|trainers_dir) '.*below a file' cannot be written"):
            deploying.deploy(config.model_copy(update=changed))


def test_an_extraction_without_ray_is_refused(cluster: Deployed, tmp_path: Path) -> None:
    source = tmp_path / "rows.npy"
    np.save(source, IMAGES)
    words = ["extract", "tiny", str(source), "--tap", "classifier", "--out", str(tmp_path / "out")]
    ended = command(*words, "--server", cluster.gateways[0], "--token", cluster.token, "--ray", "127.0.0.1:1")
    assert ended.returncode == 3  # as for a server that is not reached
    assert "no Ray cluster answers at '127.0.0.1:1'" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


# --- Last: replicas are killed, and Ray Serve replaces them ---------------------------------------------


def test_a_trainer_goes_on_though_its_replica_was_killed_amid_steps(cluster: Deployed, serve: Serve) -> None:
    labels = np.array([3, 1])

    def losses(client: trocar.Client, at: Callable[[int], None]) -> list[float]:
        trainer = client.train(
            "tiny", trainable=["classifier"], optimizer=trocar.training.sgd(lr=0.01, momentum=0.9)
        )
        found = []
        for number in range(12):
            at(number)
            found.append(trainer.step(IMAGES, labels, timeout_s=PATIENCE_S).loss)
            if number == 2:
                trainer.save()
        assert trainer.info().next_number == 12
        return found

    with direct(serve) as client:
        expected = losses(client, lambda number: None)

    def kill(number: int) -> None:
        if number in (0, 5):  # another replica is there, then only the one that Ray starts
            cluster.scale(2 if number == 0 else 1)
        if number in (2, 7):
            owner = owner_of_trainer(cluster)
            threading.Timer(0.01, os.kill, (owner["process_id"], signal.SIGKILL)).start()

    with cluster.connect() as client:
        for found in client.trainers():
            client.trainer(found.trainer_id).close()
        assert losses(client, kill) == expected


def owner_of_trainer(cluster: Deployed) -> dict[str, Any]:
    """Return the report of the replica that has the only trainer."""
    folders = (cluster.config.parent / "data" / "replicas" / "tiny" / "trainers").glob("*/*/trainer.json")
    (owner,) = {path.parts[-3] for path in folders}
    return next(replica for replica in cluster.replicas() if replica["replica_id"] == owner)


def test_a_killed_gateway_is_replaced_and_the_other_one_answers(cluster: Deployed) -> None:
    def gateways() -> dict[str, int]:
        return {report["gateway_id"]: report["process_id"] for report in cluster.reports("gateways")}

    before = gateways()
    both = ",".join(cluster.gateways)
    with trocar.connect(both, token=cluster.token, timeout_s=PATIENCE_S) as client:
        os.kill(next(iter(before.values())), signal.SIGKILL)
        for _ in range(5):
            assert client.extract("tiny", IMAGES, TAPS)
    wait_until(lambda: len(gateways()) == 2 and gateways().keys() != before.keys())


def test_replicas_are_added_killed_and_removed_without_a_failed_call(cluster: Deployed) -> None:
    with under_load(cluster) as load:
        load.grows()
        cluster.scale(4)
        load.grows()
        assert sorted(replica["slot"] for replica in cluster.replicas()) == ["0", "1", "2", "3"]
        os.kill(cluster.replicas()[0]["process_id"], signal.SIGKILL)
        load.grows()
        cluster.scale(1)
        load.grows()
    assert load.failures == []


def test_weights_are_replaced_without_a_failed_call(cluster: Deployed, serve: Serve) -> None:
    from trocar_server.cluster import deploying

    def replace(path: Path) -> None:
        before = {replica["replica_id"] for replica in cluster.replicas()}
        deploying.deploy(read_config(path))
        wait_until(lambda: before.isdisjoint(replica["replica_id"] for replica in cluster.replicas()))
        deploying.wait_until_ready(read_config(path))

    changed = {"tiny": {**MODELS["tiny"], "weights": "random:1"}}
    spread = {"tiny": f"{PLACE}\nmin_replicas = 2\nmax_per_node = 1"}
    config = write_config(cluster.config.with_name("new.toml"), changed, spread, **SETTINGS)
    with under_load(cluster) as load:
        for path, weights in ((config, "random:1"), (cluster.config, "random:0")):
            load.grows()
            replace(path)
            load.grows()
            replicas = cluster.replicas()
            assert len({replica["node_id"] for replica in replicas}) == len(replicas)
            with cluster.connect() as client, direct(serve, weights) as alone:
                found, expected = (one.extract("tiny", IMAGES, TAPS) for one in (client, alone))
                assert all(np.array_equal(found[tap], expected[tap]) for tap in TAPS)
    assert load.failures == []
