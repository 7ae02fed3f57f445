"""Data sets from the client to batches: uploaded once, each its caller's own, read as they were."""

import io
import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load
from sklearn import datasets as sklearn_datasets
from torch.utils.data import TensorDataset
from torchvision.datasets import ImageFolder

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.servers.proxy import running_proxy
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import raw_channel
from trocar._cli.app import main
from trocar._sync import datasets
from trocar._transport.rpc_errors import error_from_rpc
from trocar._wire import stored_datasets
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import dataset_pb2 as pb
from trocar_api.v1 import dataset_pb2_grpc
from trocar_server.models import ANONYMOUS
from trocar_server.training.datasets import DatasetReader, check_dataset, to_batch

PREPARED = custom(Plain, (3, 8, 8), preprocessing={"resize": (8, 8)})
MODELS = {"plain": PREPARED, "arrays": custom(Plain, (3, 8, 8))}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    return folder_of_images(tmp_path / "listed", {"cat": 3, "dog": 2})


@pytest.fixture
def serving(data_dir: Path, listed: Path) -> Iterator[RunningServer]:
    with running_server(
        models=MODELS,
        device="cpu",
        data_dir=data_dir,
        limits={"max_dataset_bytes": 4 << 20},
        datasets={"pets": {"path": listed}},
    ) as running:
        yield running


@pytest.fixture
def client(serving: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(serving.address) as connected:
        yield connected


def folder_of_images(root: Path, counts: dict[str, int], suffix: str = ".png") -> Path:
    generator = np.random.default_rng(0)
    for category, count in counts.items():
        (root / category).mkdir(parents=True)
        for index in range(count):
            pixels = generator.integers(0, 256, (9 + index, 11, 3), np.uint8)
            Image.fromarray(pixels).save(root / category / f"{index}{suffix}")
    return root


def opened(serving: RunningServer, dataset: trocar.StoredDataset) -> DatasetReader:
    return serving.app.datasets.open(ANONYMOUS, dataset.dataset_id)


def stored_shards(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "datasets" / "pool").iterdir())


class Watched:
    """Takes the progress of an upload."""

    def __init__(self) -> None:
        self.seen: list[trocar.UploadProgress] = []

    def __call__(self, progress: trocar.UploadProgress) -> None:
        self.seen.append(progress)


def test_digits_come_back_as_they_were(client: trocar.Client, serving: RunningServer, data_dir: Path) -> None:
    digits: Any = sklearn_datasets.load_digits()
    inputs = digits.images.astype(np.float32)[:, None]
    watched = Watched()
    dataset = client.upload_dataset(
        (inputs, digits.target), name="digits", shard_bytes=100_000, progress=watched
    )
    assert (dataset.sample_count, dataset.inputs) == (1797, trocar.DatasetTensor("float32", (1, 8, 8)))
    assert dataset.targets == {"": trocar.DatasetTarget("int64", (), 0, 9, 10)}
    assert len(stored_shards(data_dir)) == 5
    with_safetensors = [load(path.read_bytes())["inputs"] for path in stored_shards(data_dir)]
    assert sum(map(len, with_safetensors)) == 1797
    assert [step.read_count for step in watched.seen][:5] == [378, 756, 1134, 1512, 1797]
    assert watched.seen[-1].sent_bytes == watched.seen[-1].missing_bytes == dataset.byte_count
    reader = opened(serving, dataset)
    order = np.random.default_rng(1).permutation(1797).tolist()
    arrays = reader.arrays(order)
    np.testing.assert_array_equal(arrays["inputs"], inputs[order])
    np.testing.assert_array_equal(arrays["targets"], digits.target[order])


def test_the_second_upload_sends_nothing(client: trocar.Client, data_dir: Path) -> None:
    source = np.arange(300, dtype=np.float32).reshape(100, 3), np.arange(100) % 4
    first = client.upload_dataset(source, name="one", shard_bytes=400)
    before = [path.stat().st_ino for path in stored_shards(data_dir)]
    watched = Watched()
    assert client.upload_dataset(source, name="one", shard_bytes=400, progress=watched) == first
    assert watched.seen[-1].missing_bytes == 0
    other = client.upload_dataset(source, name="two", shard_bytes=400, progress=watched)
    assert watched.seen[-1].missing_bytes == 0
    assert other.dataset_id != first.dataset_id
    assert [path.stat().st_ino for path in stored_shards(data_dir)] == before


def test_a_folder_of_class_folders_is_what_torchvision_sees(
    client: trocar.Client, serving: RunningServer, tmp_path: Path
) -> None:
    root = folder_of_images(tmp_path / "flowers", {"rose": 4, "daisy": 3, "aster": 2})
    (root / "daisy" / "notes.txt").write_text("none")
    dataset = client.upload_dataset(root, shard_bytes=1000)
    expected = ImageFolder(str(root))
    (root / "daisy" / ".hidden.png").write_bytes(b"none")
    assert client.upload_dataset(root, shard_bytes=1000) == dataset
    assert (dataset.name, dataset.has_images, dataset.inputs) == ("flowers", True, None)
    assert list(dataset.categories) == expected.classes
    loaded = opened(serving, dataset).load(range(9))
    assert loaded.targets[""].tolist() == expected.targets
    for index, image in enumerate(loaded.inputs):
        np.testing.assert_array_equal(np.asarray(image), np.asarray(expected[index][0]))


def test_the_operators_folder_is_there_for_everybody(
    client: trocar.Client, serving: RunningServer, listed: Path
) -> None:
    (dataset,) = client.datasets()
    assert (dataset.dataset_id, dataset.is_listed, dataset.sample_count) == ("pets", True, 5)
    assert client.dataset("pets").categories == ("cat", "dog")
    expected = ImageFolder(str(listed))
    loaded = opened(serving, dataset).load([4, 0])
    assert loaded.targets[""].tolist() == [1, 0]
    np.testing.assert_array_equal(np.asarray(loaded.inputs[0]), np.asarray(expected[4][0]))
    with pytest.raises(trocar.errors.InvalidArgumentError, match="operator"):
        client.delete_dataset("pets")
    with trocar.connect(serving.address, token="bob") as bob:
        assert [found.dataset_id for found in bob.datasets()] == ["pets"]


def test_torch_datasets_give_what_torch_gives(client: trocar.Client, serving: RunningServer) -> None:
    x, y = torch.randn(20, 3, 8, 8), torch.arange(20) % 3
    dataset = client.upload_dataset(TensorDataset(x, y), name="torch", shard_bytes=5000)
    reader, hosted = opened(serving, dataset), serving.engine.catalogue.loaded("arrays")
    batch = serving.on_owner(lambda: to_batch(reader.load([3, 19, 0]), reader.info, hosted))
    assert batch.size == 3
    assert torch.equal(batch.kwargs["x"], x[[3, 19, 0]])
    assert torch.equal(batch.targets[""], y[[3, 19, 0]])


class Odd:
    """A map-style data set of everything: PIL images, several targets, a mask."""

    classes = ("a", "b")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        pixels = np.full((5, 6, 3), index, np.uint8)
        mask = Image.fromarray(np.full((5, 6), index, np.uint8))
        return Image.fromarray(pixels), {"label": index % 2, "score": index / 2, "mask": mask}


def test_images_and_several_targets_of_an_object(client: trocar.Client, serving: RunningServer) -> None:
    dataset = client.upload_dataset(Odd(), shard_bytes=100)
    assert dataset.categories == ("a", "b")
    assert dataset.name == "Odd"
    assert {name: (t.dtype, t.shape, t.high) for name, t in dataset.targets.items()} == {
        "label": ("int64", (), 1),
        "score": ("float32", (), None),
        "mask": ("uint8", (5, 6), 3),
    }
    loaded = opened(serving, dataset).load([3, 1])
    assert [np.asarray(image).max() for image in loaded.inputs] == [3, 1]
    assert loaded.targets["score"].tolist() == [1.5, 0.5]


def test_hugging_face_images_and_labels(client: trocar.Client, serving: RunningServer) -> None:
    datasets = pytest.importorskip("datasets")
    images = [Image.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (1, 2, 3)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    source = datasets.Dataset.from_dict({"img": images, "label": [0, 1, 1]}, features=features)
    dataset = client.upload_dataset(source, name="hf")
    assert (dataset.categories, dataset.has_images) == (("no", "yes"), True)
    loaded = opened(serving, dataset).load([2, 0])
    assert loaded.targets[""].tolist() == [1, 0]
    assert np.asarray(loaded.inputs[0]).max() == 3


def test_callers_see_their_own_only(client: trocar.Client, serving: RunningServer, data_dir: Path) -> None:
    source = np.ones((5, 2), np.float32), np.arange(5)
    with (
        trocar.connect(serving.address, token="alice") as alice,
        trocar.connect(serving.address, token="bob") as bob,
    ):
        mine = alice.upload_dataset(source)
        assert [found.dataset_id for found in bob.datasets()] == ["pets"]
        for stranger in (bob, client):
            with pytest.raises(trocar.errors.UnknownDatasetError) as theirs:
                stranger.dataset(mine.dataset_id)
            with pytest.raises(trocar.errors.UnknownDatasetError) as nobodys:
                stranger.dataset("0" * 32)
            assert str(theirs.value).replace(mine.dataset_id, "0" * 32) == str(nobodys.value)
            with pytest.raises(trocar.errors.UnknownDatasetError):
                stranger.delete_dataset(mine.dataset_id)
        watched = Watched()
        his = bob.upload_dataset(source, progress=watched)
        assert watched.seen[-1].missing_bytes > 0
        assert len(stored_shards(data_dir)) == 1
        alice.delete_dataset(mine.dataset_id)
        assert bob.dataset(his.dataset_id).is_complete


def test_more_than_the_limit_is_refused_before_it_is_sent(client: trocar.Client, data_dir: Path) -> None:
    watched = Watched()
    with pytest.raises(trocar.errors.QuotaExceededError, match="4,194,304") as caught:
        client.upload_dataset(np.zeros((5 << 20, 1), np.uint8), progress=watched)
    assert caught.value.details["limit"] == str(4 << 20)
    assert all(step.missing_bytes == 0 for step in watched.seen)
    client.upload_dataset(np.zeros((3 << 20, 1), np.uint8))
    with pytest.raises(trocar.errors.QuotaExceededError):
        client.upload_dataset(np.ones((2 << 20, 1), np.uint8))
    assert len(client.datasets()) == 2
    assert len(stored_shards(data_dir)) == 1


def test_a_broken_connection_sends_the_missing_shards_only(serving: RunningServer, data_dir: Path) -> None:
    source = np.random.default_rng(0).integers(0, 256, (64, 10_000), np.uint8), np.arange(64)
    with running_proxy(serving.address) as proxy, trocar.connect(proxy.address) as client:
        watched = Watched()

        def breaking(progress: trocar.UploadProgress) -> None:
            watched(progress)
            if progress.sent_bytes and len(watched.seen) % 3 == 0:
                proxy.break_connections()

        dataset = client.upload_dataset(source, shard_bytes=40_000, progress=breaking)
    assert dataset.is_complete
    assert proxy.connection_count > 3
    assert len(stored_shards(data_dir)) == 22
    np.testing.assert_array_equal(opened(serving, dataset).arrays(range(64))["inputs"], source[0])
    assert not list((data_dir / "datasets" / "incoming").iterdir())


def test_a_connection_that_breaks_within_a_shard_sends_that_shard_again(
    serving: RunningServer, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = np.random.default_rng(0).integers(0, 256, (3, 1 << 20), np.uint8)
    sent: list[int] = []
    with running_proxy(serving.address) as proxy, trocar.connect(proxy.address) as client:

        def breaking(*args: Any) -> Iterator[pb.UploadShardRequest]:
            for message in stored_datasets.shard_requests(*args):
                yield message
                sent.append(len(message.data))
                if len(sent) == 2:
                    wait_until(lambda: bool(list((data_dir / "datasets" / "incoming").iterdir())))
                    proxy.break_connections()

        monkeypatch.setattr(datasets, "shard_requests", breaking)
        dataset = client.upload_dataset(source)
    assert len(sent) > 4
    np.testing.assert_array_equal(opened(serving, dataset).arrays([2, 0])["inputs"], source[[2, 0]])
    wait_until(lambda: not list((data_dir / "datasets" / "incoming").iterdir()))


def test_an_upload_that_was_given_up_goes_on(client: trocar.Client, data_dir: Path) -> None:
    source = np.random.default_rng(0).integers(0, 256, (10, 1000), np.uint8), np.arange(10)

    def stop(progress: trocar.UploadProgress) -> None:
        if progress.sent_bytes > 3000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.upload_dataset(source, shard_bytes=1000, progress=stop)
    kept = len(stored_shards(data_dir))
    (begun,) = [found for found in client.datasets() if not found.is_listed]
    assert not begun.is_complete
    watched = Watched()
    dataset = client.upload_dataset(source, shard_bytes=1000, progress=watched)
    assert dataset.dataset_id == begun.dataset_id
    assert 0 < watched.seen[-1].missing_bytes < dataset.byte_count
    assert len(stored_shards(data_dir)) == 10 > kept > 0


def test_data_sets_survive_a_restart(data_dir: Path) -> None:
    source = np.ones((5, 2), np.float32), np.arange(5)
    for is_first in (True, False):
        with (
            running_server(models={}, device="cpu", data_dir=data_dir) as running,
            trocar.connect(running.address) as client,
        ):
            if is_first:
                client.upload_dataset(source, name="one")
            assert [found.name for found in client.datasets()] == ["one"]
            assert opened(running, client.datasets()[0]).arrays([4])["targets"].tolist() == [4]


def test_a_deleted_data_set_leaves_nothing(client: trocar.Client, data_dir: Path) -> None:
    dataset = client.upload_dataset(np.ones((5, 2), np.float32))
    client.delete_dataset(dataset.dataset_id)
    assert stored_shards(data_dir) == []
    assert [found.dataset_id for found in client.datasets()] == ["pets"]


def test_images_for_a_model_are_prepared_as_its_weights_want(
    client: trocar.Client, serving: RunningServer, tmp_path: Path
) -> None:
    root = folder_of_images(tmp_path / "two", {"a": 2, "b": 1})
    dataset = client.upload_dataset(root)
    reader, hosted = opened(serving, dataset), serving.engine.catalogue.loaded("plain")
    batch = serving.on_owner(lambda: to_batch(reader.load([2, 0]), reader.info, hosted))
    expected = [ImageFolder(str(root))[index][0] for index in (2, 0)]
    assert hosted.preprocessing is not None
    oracle = hosted.preprocessing(expected)
    assert isinstance(oracle, torch.Tensor)
    assert torch.equal(batch.kwargs["x"], oracle)
    without = serving.engine.catalogue.loaded("arrays")
    with pytest.raises(Exception, match="no preprocessing"):
        check_dataset(reader.info, without)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ((np.ones((3, 2), np.float32), np.arange(4)), ValueError),
        (np.ones((0, 2), np.float32), ValueError),
        (np.ones(3, np.complex64), TypeError),
        (np.array(["a", "b"]), TypeError),
        ([], ValueError),
        (7, trocar.errors.SourceError),
        ([np.ones(2), np.ones(3)], trocar.errors.SourceError),
        ([(np.ones(2), 1, 2)], trocar.errors.SourceError),
        ("nowhere/", trocar.errors.SourceError),
    ],
)
def test_what_is_no_data_set_is_refused_by_the_client(
    client: trocar.Client, source: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        client.upload_dataset(source)


def test_a_damaged_image_is_named_by_the_server(client: trocar.Client, tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "bad", {"a": 2})
    (root / "a" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    with pytest.raises(trocar.errors.DatasetInvalidError, match="image 1"):
        client.upload_dataset(root)


def test_a_source_that_changes_meanwhile_is_found_out(client: trocar.Client) -> None:
    array = np.zeros((4, 3), np.float32)

    def change(_: trocar.UploadProgress) -> None:
        array[:] = 1

    with pytest.raises(trocar.errors.SourceError, match="the source changed"):
        client.upload_dataset(array, progress=change)


async def test_the_asyncio_client_does_the_same(serving: RunningServer) -> None:
    async with trocar.aio.connect(serving.address) as client:
        dataset = await client.upload_dataset((np.ones((5, 2), np.float32), list("abcab")), shard_bytes=16)
        assert dataset.categories == ("a", "b", "c")
        assert [found.dataset_id for found in await client.datasets()] == ["pets", dataset.dataset_id]
        await client.delete_dataset(dataset.dataset_id)


def refused(call: Callable[[], Any]) -> ErrorReason | None:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_from_rpc(caught.value).reason


def test_messages_that_no_client_of_ours_sends(serving: RunningServer) -> None:
    with raw_channel(serving.address) as channel:
        stub: Any = dataset_pb2_grpc.DatasetServiceStub(channel)
        shard = pb.DatasetShard(sha256="0" * 64, byte_count=10, sample_count=1)
        manifest = pb.DatasetManifest(name="one", sample_count=1, shards=[shard])
        begun = stub.BeginUpload(pb.BeginUploadRequest(manifest=manifest))
        head = {"dataset_id": begun.dataset_id, "sha256": "0" * 64}
        kind = pb.UploadShardRequest
        for messages, reason in [
            ([], ErrorReason.INVALID_ARGUMENT),
            ([kind()], ErrorReason.UNKNOWN_DATASET),
            ([kind(dataset_id=begun.dataset_id)], ErrorReason.DATASET_INVALID),
            ([kind(**head), kind(**head)], ErrorReason.INVALID_ARGUMENT),
            ([kind(data=bytes(11), **head)], ErrorReason.DATASET_INVALID),
            ([kind(data=bytes(10), **head)], ErrorReason.DATASET_INVALID),
        ]:
            assert refused(partial(stub.UploadShard, iter(messages))) is reason
        method: Any = channel.stream_unary("/trocar_api.v1.DatasetService/UploadShard", None, None)
        assert refused(lambda: method(iter([b"\xff\xff"]))) is ErrorReason.INVALID_ARGUMENT
        assert (
            refused(lambda: stub.CommitUpload(pb.CommitUploadRequest(dataset_id=begun.dataset_id)))
            is ErrorReason.DATASET_INVALID
        )
        assert refused(lambda: stub.BeginUpload(pb.BeginUploadRequest())) is ErrorReason.DATASET_INVALID


def test_a_cancelled_shard_leaves_no_file_and_no_place_taken(serving: RunningServer, data_dir: Path) -> None:
    with raw_channel(serving.address) as channel:
        stub: Any = dataset_pb2_grpc.DatasetServiceStub(channel)
        shard = pb.DatasetShard(sha256="0" * 64, byte_count=1 << 20, sample_count=1)
        manifest = pb.DatasetManifest(name="one", sample_count=1, shards=[shard])
        begun = stub.BeginUpload(pb.BeginUploadRequest(manifest=manifest))
        incoming = data_dir / "datasets" / "incoming"
        for _ in range(8):  # more than may come in at once
            call = cancelled_call(stub, begun.dataset_id, incoming)
            assert call.code() is grpc.StatusCode.CANCELLED
            wait_until(lambda: not list(incoming.iterdir()))


def cancelled_call(stub: Any, dataset_id: str, incoming: Path) -> Any:
    release = threading.Event()

    def messages() -> Iterator[pb.UploadShardRequest]:
        yield pb.UploadShardRequest(dataset_id=dataset_id, sha256="0" * 64, data=bytes(1000))
        release.wait(60)

    call = stub.UploadShard.future(messages())
    wait_until(lambda: bool(list(incoming.iterdir())))
    call.cancel()
    release.set()
    return call


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline
        pause.wait(0.01)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command_line(serving: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = ("--server", serving.address)
    root = folder_of_images(tmp_path / "flowers", {"rose": 2, "daisy": 1})
    code, out, _ = run(capsys, "datasets", "upload", str(root), "--json", *server)
    assert code == 0
    dataset = json.loads(out)
    assert dataset["categories"] == ["daisy", "rose"]
    np.savez(tmp_path / "two.npz", inputs=np.ones((4, 2), np.float32), targets=np.arange(4))
    code, out, _ = run(capsys, "datasets", "upload", str(tmp_path / "two.npz"), *server)
    assert "two: 4 samples" in out
    code, out, _ = run(capsys, "datasets", "list", *server)
    assert [line.split()[1] for line in out.splitlines()[2:]] == ["pets", "flowers", "two"]
    assert run(capsys, "datasets", "remove", dataset["dataset_id"], *server)[0] == 0
    code, _, err = run(capsys, "datasets", "remove", dataset["dataset_id"], *server)
    assert (code, "UNKNOWN_DATASET" in err) == (1, True)
    assert run(capsys, "datasets", "upload", str(tmp_path / "nowhere"), *server)[0] == 1


def test_a_server_with_a_bad_folder_does_not_start(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(Exception, match=r"datasets\.pets: it has no class folders"):
        serve(models={}, data_dir=tmp_path / "data", datasets={"pets": {"path": tmp_path / "empty"}})


def test_jpegs_arrive_byte_by_byte(client: trocar.Client, serving: RunningServer, tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "photos", {"a": 3}, ".jpg")
    reader = opened(serving, client.upload_dataset(root))
    for index, sample in enumerate(reader.samples([0, 1, 2])):
        assert sample.inputs == (root / "a" / f"{index}.jpg").read_bytes()
        assert Image.open(io.BytesIO(bytes(sample.inputs))).format == "JPEG"
