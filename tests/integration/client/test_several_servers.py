"""One client of two servers: calls go on when one is gone, and what one server keeps is found there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.tiny_training import MODELS as TRAINABLE
from tests.support.oracles.tiny_training import batches, make_trainer
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from trocar._cli import main
from trocar._transport.targets import addresses_of, host_of, listed_target

ROW = np.arange(3, dtype=np.float32).reshape(1, 3)
MODELS: dict[str, Any] = {"identity": custom(Identity), **TRAINABLE}


class Pair:
    """Two servers with the same models, each with a data directory of its own."""

    def __init__(self, serve: Serve, tmp_path: Path) -> None:
        self.servers = [serve(models=MODELS, data_dir=tmp_path / name) for name in ("one", "other")]
        self.target = ",".join(server.address for server in self.servers)
        self.client = trocar.connect(self.target, timeout_s=60)

    def alone(self, server: RunningServer) -> trocar.Client:
        return trocar.connect(server.address)

    def owner(self, trainer_id: str) -> int:
        """Return which server has a trainer."""
        has = [
            any(one.trainer_id == trainer_id for one in server.app.trainers.all()) for server in self.servers
        ]
        assert sum(has) == 1
        return has.index(True)

    def kill(self, index: int) -> None:
        server = self.servers[index]
        server.run(lambda: server.app.rpc.stop(0))


@pytest.fixture
def pair(serve: Serve, tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(serve, tmp_path)
    with pair.client:
        yield pair


def extract(client: trocar.Client) -> None:
    assert np.array_equal(client.extract("identity", ROW, "identity")["identity"], ROW)


def test_both_servers_are_asked_in_turn(pair: Pair) -> None:
    seen = set()
    for _ in range(100_000):  # until both connections are there
        seen.add(pair.client.server_info().server_id)
        if len(seen) == 2:
            break
    assert len(seen) == 2
    assert seen == {server.app.lifecycle.server_id for server in pair.servers}


@pytest.mark.parametrize("gone", [0, 1])
def test_extraction_goes_on_when_one_is_gone(pair: Pair, gone: int) -> None:
    for _ in range(10):
        extract(pair.client)
    pair.kill(gone)
    for _ in range(30):
        extract(pair.client)
    assert pair.client.server_info().server_id == pair.servers[1 - gone].app.lifecycle.server_id


def test_a_server_that_runs_empty_is_left_out(pair: Pair) -> None:
    with pair.alone(pair.servers[0]) as first:
        first.drain()
        for _ in range(30):
            extract(pair.client)
        first.drain(undo=True)


def test_a_trainers_calls_reach_the_server_that_has_it(pair: Pair) -> None:
    trainer = make_trainer(pair.client)
    owner = pair.owner(trainer.trainer_id)
    for images, labels in batches(3):
        trainer.step(images, labels)
    assert trainer.info().update_count == 3
    with trocar.connect(pair.target) as another:  # another program: the id alone is known
        found = another.trainer(trainer.trainer_id)
        assert found.info().update_count == 3
        assert [info.trainer_id for info in another.trainers()] == [trainer.trainer_id]
        assert pair.owner(found.trainer_id) == owner


def test_a_trainer_on_the_second_server_is_found_there(pair: Pair) -> None:
    with pair.alone(pair.servers[1]) as second:
        trainer = make_trainer(second)
        assert pair.client.trainer(trainer.trainer_id).info().trainer_id == trainer.trainer_id
        with pytest.raises(trocar.errors.UnknownTrainerError):
            pair.client.trainer("0" * 32)


def test_a_trainer_whose_server_is_gone_is_not_said_to_be_unknown(pair: Pair) -> None:
    trainer = make_trainer(pair.client)
    pair.kill(pair.owner(trainer.trainer_id))
    with trocar.connect(pair.target, retries=0) as another:
        with pytest.raises(trocar.errors.ServerUnavailableError):
            another.trainer(trainer.trainer_id)
        made = make_trainer(another)  # by the server that is left
        assert made.info().update_count == 0


def test_data_sets_are_uploaded_to_one_server_and_found(pair: Pair) -> None:
    images, labels = next(iter(batches(1)))
    dataset = pair.client.upload_dataset((images, labels))
    assert [one.dataset_id for one in pair.client.datasets()] == [dataset.dataset_id]
    assert pair.client.dataset(dataset.dataset_id).dataset_id == dataset.dataset_id
    pair.client.delete_dataset(dataset.dataset_id)
    assert pair.client.datasets() == []
    with pytest.raises(trocar.errors.UnknownDatasetError):
        pair.client.dataset(dataset.dataset_id)


def test_fitted_directions_are_at_every_server(pair: Pair) -> None:
    rows = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    labels = np.where(rows[:, 0] > 0, "b", "a")
    fitted = pair.client.fit_direction("identity", rows, labels, "identity", name="side", folds=0)
    digests = set()
    for server in pair.servers:
        with pair.alone(server) as one:
            (stored,) = one.directions()
            digests.add(stored.digest)
            read = one.extract("identity", rows, trocar.readout("side"))["identity:side"]
            np.testing.assert_allclose(
                read, one.direction("identity", "side").read(rows), rtol=1e-4, atol=1e-5
            )
    assert digests == {fitted.rows[0].digest}
    assert [each.name for each in pair.client.directions()] == ["side"]
    pair.client.delete_directions("identity", "side")
    assert pair.client.directions() == []


def test_stored_edits_are_at_every_server(pair: Pair) -> None:
    pair.client.store_edits("identity", "nothing", [trocar.edit("identity", "zero")])
    for _ in range(10):
        found = pair.client.extract("identity", ROW, "identity", edits="nothing")["identity"]
        assert np.array_equal(found, np.zeros_like(ROW))
    assert [stored.name for stored in pair.client.stored_edits()] == ["nothing"]
    pair.client.delete_edits("identity", "nothing")
    assert pair.client.stored_edits() == []


@pytest.mark.parametrize("has", [0, 1])
def test_stored_edits_of_one_server_are_deleted_there(pair: Pair, has: int) -> None:
    """As when another one was gone or new: it has no such edits."""
    with pair.alone(pair.servers[has]) as one:
        one.store_edits("identity", "nothing", trocar.edit("identity", "zero"))
        pair.client.delete_edits("identity", "nothing")
        assert one.stored_edits() == []
    with pytest.raises(trocar.errors.UnknownEditsError):
        pair.client.delete_edits("identity", "nothing")


def test_stored_edits_are_deleted_while_a_server_is_gone(pair: Pair) -> None:
    with pair.alone(pair.servers[1]) as one:
        one.store_edits("identity", "nothing", trocar.edit("identity", "zero"))
    pair.kill(0)
    pair.client.delete_edits("identity", "nothing")
    with pytest.raises(trocar.errors.UnknownEditsError):
        pair.client.delete_edits("identity", "nothing")


def test_two_addresses_of_one_server_are_one_server(serve: Serve) -> None:
    """As the gateways of a cluster are: what one stores, the other one has."""
    server = serve(models=MODELS)
    port = server.address.rpartition(":")[2]
    with trocar.connect(f"127.0.0.1:{port},localhost:{port}") as client:
        stored = client.store_edits("identity", "zeros", trocar.edit("identity", "zero"))
        assert [one.name for one in client.stored_edits()] == [stored.name] == ["zeros"]
        client.delete_edits("identity", "zeros")
        assert client.stored_edits() == []


def test_models_are_loaded_and_unloaded_everywhere(pair: Pair) -> None:
    pair.client.unload("identity")
    for server in pair.servers:
        with pair.alone(server) as one, pytest.raises(trocar.errors.ModelNotLoadedError):
            one.extract("identity", ROW, "identity")
    pair.client.load("identity")
    for server in pair.servers:
        with pair.alone(server) as one:
            extract(one)


def test_what_an_operator_does_is_for_one_server(pair: Pair) -> None:
    for call in (pair.client.drain, pair.client.reload_config, pair.client.page):
        with pytest.raises(ValueError, match="one server"):
            call()


@pytest.mark.parametrize(
    "words", ["status", "admin drain", "admin drain --wait", "admin reload", "page --port 0"]
)
def test_a_command_for_one_server_is_refused_in_words(
    pair: Pair, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), "--server", pair.target])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert "for one server; connect to that one alone" in " ".join(said.split())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("localhost:1", ()),
        ("a:1,b:2", ("a:1", "b:2")),
        ("a:1, b:2", ("a:1", "b:2")),
        ("ipv4:10.0.0.1:1,10.0.0.2:2", ("ipv4:10.0.0.1:1", "ipv4:10.0.0.2:2")),
        ("ipv6:[::1]:1,[::2]:2", ("ipv6:[::1]:1", "ipv6:[::2]:2")),
        ("dns:///gpu:50051", ()),
        ("unix:/a,b", ()),
    ],
)
def test_a_target_lists_servers(target: str, expected: tuple[str, ...]) -> None:
    assert addresses_of(target) == expected


@pytest.mark.parametrize("target", ["a:1,", ",", "ipv4:1.2.3.4:1,"])
def test_an_empty_address_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="empty"):
        trocar.connect(target)


def test_names_are_looked_up_and_kinds_of_addresses_are_not_mixed() -> None:
    assert listed_target(("127.0.0.1:1", "127.0.0.2:2")) == "ipv4:127.0.0.1:1,127.0.0.2:2"
    assert listed_target(("[::1]:1", "[::1]:2")) == "ipv6:[::1]:1,[::1]:2"
    assert listed_target(("ipv4:1.2.3.4:5", "ipv4:1.2.3.5:5")) == "ipv4:1.2.3.4:5,1.2.3.5:5"
    with pytest.raises(ValueError, match="IPv4 and IPv6"):
        listed_target(("127.0.0.1:1", "[::1]:2"))
    with pytest.raises(ValueError, match="cannot resolve the server 'a b:1'"):
        listed_target(("a b:1", "127.0.0.1:1"))
    assert [host_of(address) for address in ("gpu1:5", "[::1]:5", "ipv4:1.2.3.4:5")] == [
        "gpu1",
        "::1",
        "1.2.3.4",
    ]


def test_a_token_goes_to_several_servers_of_this_machine_only() -> None:
    trocar.connect("127.0.0.1:1,127.0.0.1:2", token="x").close()
    with pytest.raises(ValueError, match="would be sent in plain text"):
        trocar.connect("127.0.0.1:1,gpu2:2", token="x")
