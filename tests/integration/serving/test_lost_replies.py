"""Deletions and publications whose reply is lost: the client sends them again, and they have succeeded."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

import trocar
from tests.support.oracles.tiny_training import MODELS, make_trainer, samples
from tests.support.servers.gateway import Gateway, is_serving
from tests.support.servers.proxy import Proxy, running_proxy
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import raw_channel
from trocar.errors import (
    EditsExistError,
    ModelConflictError,
    UnknownDatasetError,
    UnknownEditsError,
    UnknownModelError,
)
from trocar_api.repeats import REPEATED_KEY
from trocar_api.v1.dataset_pb2 import DeleteDatasetRequest
from trocar_api.v1.dataset_pb2_grpc import DatasetServiceStub
from trocar_api.v1.edit_pb2 import Edit, Operand
from trocar_api.v1.edit_store_pb2 import StoredEdits, StoreEditsRequest
from trocar_api.v1.edit_store_pb2_grpc import EditStoreServiceStub
from trocar_api.v1.fit_pb2 import FIT_COMMAND_CANCEL, FIT_COMMAND_PAUSE, ControlFitRequest
from trocar_api.v1.fit_pb2_grpc import FitServiceStub
from trocar_api.v1.trainer_pb2 import PublishTrainerRequest, SaveTrainerRequest
from trocar_api.v1.trainer_pb2_grpc import TrainerServiceStub


class Dataset:
    """A data set, deleted by its id."""

    error = UnknownDatasetError

    def make(self, client: trocar.Client) -> None:
        images, labels = samples(4)
        self._id = client.upload_dataset(images, targets=labels, name="some").dataset_id

    def delete(self, client: trocar.Client) -> None:
        client.delete_dataset(self._id)

    def is_there(self, client: trocar.Client) -> bool:
        return bool(client.datasets())


class Edits:
    """Stored edits."""

    error = UnknownEditsError

    def make(self, client: trocar.Client) -> None:
        client.store_edits("tiny", "some", trocar.edit("fc", "zero"))

    def delete(self, client: trocar.Client) -> None:
        client.delete_edits("tiny", "some")

    def is_there(self, client: trocar.Client) -> bool:
        return bool(client.stored_edits())


class Published:
    """A published model."""

    error = UnknownModelError

    def make(self, client: trocar.Client) -> None:
        make_trainer(client).publish("some")

    def delete(self, client: trocar.Client) -> None:
        client.unpublish("some")

    def is_there(self, client: trocar.Client) -> bool:
        return "some" in [model.model_id for model in client.models()]


@contextmanager
def connected(
    server: RunningServer,
) -> Iterator[tuple[Proxy, trocar.Client, trocar.Client, ThreadPoolExecutor]]:
    """Yield a proxy to a server, a client beside it, one through it, and a thread for the latter's calls."""
    with (
        running_proxy(server.address) as proxy,
        trocar.connect(server.address) as direct,
        trocar.connect(proxy.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        yield proxy, direct, client, pool


KINDS: list[Callable[[], Dataset | Edits | Published]] = [Dataset, Edits, Published]


@pytest.mark.parametrize("make", KINDS)
def test_a_deletion_whose_reply_is_lost_succeeds(
    serve: Serve, tmp_path: Path, make: Callable[[], Dataset | Edits | Published]
) -> None:
    server, kind = serve(models=MODELS, data_dir=tmp_path), make()
    with connected(server) as (proxy, direct, client, pool):
        kind.make(client)
        proxy.loses_replies = True
        deleting = pool.submit(kind.delete, client)
        wait_until(lambda: not kind.is_there(direct))
        proxy.loses_replies = False
        proxy.break_connections()
        deleting.result()
        with pytest.raises(kind.error):
            kind.delete(client)


def test_a_publication_whose_reply_is_lost_succeeds(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path)
    with connected(server) as (proxy, direct, client, pool):
        trainer = make_trainer(client)
        trainer.step(*samples(4))
        proxy.loses_replies = True
        publishing = pool.submit(trainer.publish, "some")
        wait_until(lambda: "some" in [model.model_id for model in direct.models()])
        proxy.loses_replies = False
        proxy.break_connections()
        assert publishing.result() == "some"
        with pytest.raises(ModelConflictError):
            trainer.publish("some")


def test_a_repeated_publication_of_other_weights_is_refused(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path)
    with trocar.connect(server.address) as client, raw_channel(server.address) as channel:
        trainer = make_trainer(client)
        request = PublishTrainerRequest(trainer_id=trainer.trainer_id, model_id="some")

        def publish_again() -> None:
            TrainerServiceStub(channel).PublishTrainer(request, metadata=((REPEATED_KEY, "1"),), timeout=60)

        publish_again()  # the first attempt never came
        publish_again()
        for taken in ("tiny", "some"):
            trainer.step(*samples(4))
            request.model_id = taken
            with pytest.raises(grpc.RpcError) as refused:
                publish_again()
            assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


def test_a_checkpoint_whose_reply_is_lost_is_written_once(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path)
    with connected(server) as (proxy, direct, client, pool):
        trainer = make_trainer(client)
        trainer.step(*samples(4))
        known = direct.trainer(trainer.trainer_id)
        proxy.loses_replies = True
        saving = pool.submit(trainer.save, "some")
        wait_until(lambda: bool(known.checkpoints()))
        proxy.loses_replies = False
        proxy.break_connections()
        assert [saving.result()] == known.checkpoints()
        assert trainer.save("some").number == 2


def test_an_adapter_whose_checkpoint_is_lost_is_loaded_once(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path / "data")
    with connected(server) as (proxy, direct, client, pool):
        trainer = make_trainer(client, lora=trocar.training.lora({"fc": 2}, name="a"))
        folder = trainer.export_adapter(tmp_path / "adapter")
        known = direct.trainer(trainer.trainer_id)
        proxy.loses_replies = True
        loading = pool.submit(trainer.load_adapter, folder)
        wait_until(lambda: bool(known.checkpoints()))
        proxy.loses_replies = False
        proxy.break_connections()
        assert [loading.result()] == known.checkpoints()


def test_a_request_for_a_checkpoint_is_known_after_a_restart(tmp_path: Path) -> None:
    request = SaveTrainerRequest(request_id="a")
    saved = []
    for _ in range(2):
        with (
            running_server(models=MODELS, data_dir=tmp_path, device="cpu") as server,
            trocar.connect(server.address) as client,
            raw_channel(server.address) as channel,
        ):
            if not request.trainer_id:
                trainer = make_trainer(client)
                trainer.step(*samples(4))
                request.trainer_id = trainer.trainer_id
            save = TrainerServiceStub(channel).SaveTrainer
            saved += [save(request, timeout=60).checkpoint for _ in range(2)]
    assert saved == [saved[0]] * 4
    assert (saved[0].number, saved[0].next_number) == (1, 1)


def test_edits_whose_reply_is_lost_are_stored_once(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path)
    with connected(server) as (proxy, direct, client, pool):
        assert not client.stored_edits()  # it is connected
        values = trocar.edit("fc", "zero")
        proxy.loses_replies = True
        storing = pool.submit(client.store_edits, "tiny", "some", values)
        wait_until(lambda: bool(direct.stored_edits()))
        (stored,) = direct.stored_edits()
        proxy.loses_replies = False
        proxy.break_connections()
        assert storing.result() == stored
        with pytest.raises(EditsExistError):
            client.store_edits("tiny", "some", values)


def test_a_repeated_list_of_other_edits_is_refused(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path)
    with raw_channel(server.address) as channel:

        def store(value: float, **options: Any) -> StoredEdits:
            edit = Edit(selector="fc", scale=Operand(constant=value))
            request = StoreEditsRequest(model_id="tiny", name="some", edits=[edit])
            return EditStoreServiceStub(channel).StoreEdits(request, timeout=60, **options).stored

        repeated = {"metadata": ((REPEATED_KEY, "1"),)}
        first = store(2.0, **repeated)  # the first attempt never came
        assert store(2.0, **repeated) == first
        for value, options in ((3.0, repeated), (2.0, {})):
            with pytest.raises(grpc.RpcError) as refused:
                store(value, **options)
            assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS


def test_the_end_of_a_fit_that_is_asked_for_again_is_no_error(serve: Serve, tmp_path: Path) -> None:
    server = serve(models=MODELS, data_dir=tmp_path)
    with trocar.connect(server.address) as client, raw_channel(server.address) as channel:
        request = ControlFitRequest(trainer_id=make_trainer(client).trainer_id)
        control, repeated = FitServiceStub(channel).ControlFit, ((REPEATED_KEY, "1"),)
        request.command = FIT_COMMAND_CANCEL
        assert control(request, timeout=60, metadata=repeated).state == "ended"
        for command, metadata in ((FIT_COMMAND_CANCEL, ()), (FIT_COMMAND_PAUSE, repeated)):
            request.command = command
            with pytest.raises(grpc.RpcError) as refused:
                control(request, timeout=60, metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_gateway_passes_on_that_a_call_is_repeated(serve: Serve, tmp_path: Path) -> None:
    gateway = Gateway(serve(models=MODELS, data_dir=tmp_path), models=["tiny"])
    try:
        wait_until(lambda: is_serving(gateway))
        with trocar.connect(gateway.address) as client, pytest.raises(UnknownDatasetError):
            client.delete_dataset("0" * 32)
        with raw_channel(gateway.address) as channel:
            request = DeleteDatasetRequest(dataset_id="0" * 32)
            DatasetServiceStub(channel).DeleteDataset(request, metadata=((REPEATED_KEY, "1"),), timeout=60)
    finally:
        gateway.stop()
