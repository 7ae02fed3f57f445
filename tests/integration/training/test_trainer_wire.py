"""Random and hostile messages: each is refused with a reason, or works; the server fails on none of them.

`TROCAR_EXAMPLES=5000` tries more.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from google.protobuf.struct_pb2 import Struct, Value
from hypothesis import given, settings
from hypothesis import strategies as st

import trocar
from tests.support.files.scale import count
from tests.support.oracles.tiny_training import MODELS, make_trainer, samples
from tests.support.servers.running_server import running_server
from tests.support.wire.random_trainers import FITS, INT64, TEXT, specs, struct
from tests.support.wire.wire import chunk, raw_channel, tensor, unary_call
from trocar._transport.rpc_errors import error_from_rpc
from trocar_api.v1 import edit_pb2, fit_pb2, tensor_pb2
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.servers.running_server import RunningServer

EXAMPLES = count(150, "TROCAR_EXAMPLES")
BATCH = samples(4)
many = settings(max_examples=EXAMPLES)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu", data_dir=tmp_path_factory.mktemp("wire")) as server:
        yield server


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(running.address) as connected:
        width = connected.extract("tiny", BATCH[0], "conv")["conv"].shape[1]
        connected.store_direction("tiny", "axis", "conv", trocar.Direction.of(np.ones(width), mean_norm=1.0))
        yield connected


@pytest.fixture(scope="module")
def channel(running: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(running.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def trainer(client: trocar.Client) -> trocar.training.Trainer:
    return make_trainer(client, head=3)


@pytest.fixture(scope="module")
def dataset_id(client: trocar.Client) -> str:
    return client.upload_dataset(samples(8)).dataset_id


_NOT_ALLOWED = (
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # it took more than 30 s
)


def answered(channel: grpc.Channel, method: str, *messages: bytes) -> list[bytes] | None:
    """Make a call; returns the reply, or None when it was refused in a way that says why."""
    call: Any = channel.stream_stream(f"/trocar_api.v1.{method}", None, None)
    try:
        return list(call(iter(messages), timeout=30))
    except grpc.RpcError as error:
        if error.code() in _NOT_ALLOWED:
            pytest.fail(f"{error.code()}: {error.details()}")
        found = error_from_rpc(error)
        assert isinstance(found, trocar.TrocarError)
        assert found.reason, found
        return None


# --- Tests -----------------------------------------------------------------------------------------------


@many
@given(spec=specs())
def test_any_description_of_a_trainer_is_answered(
    channel: grpc.Channel, client: trocar.Client, spec: pb.TrainerSpec
) -> None:
    request = pb.CreateTrainerRequest(spec=spec)
    reply = answered(channel, "TrainerService/CreateTrainer", request.SerializeToString())
    if reply is None:
        return
    made = pb.CreateTrainerResponse.FromString(reply[0]).trainer
    trainer = trocar.training.Trainer(client, made.trainer_id)
    try:
        steps(channel, made.trainer_id)
        trainer.save()
        trainer.restore()
    except trocar.TrocarError as error:
        assert error.reason not in ("", "INTERNAL"), error  # noqa: PT017
    finally:
        trainer.close()


def steps(channel: grpc.Channel, trainer_id: str) -> None:
    request = train_request(trainer_id)
    for _ in range(2):
        answered(channel, "TrainerService/Train", request.SerializeToString())


def train_request(trainer_id: str, **fields: Any) -> pb.TrainRequest:
    images, labels = BATCH
    chosen: dict[str, Any] = {
        "kind": pb.TRAIN_KIND_STEP,
        "inputs": [tensor(images.shape)],
        "targets": [pb.Target(tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[4]))],
        "chunks": [chunk(images.tobytes(), 0), chunk(labels.astype("int64").tobytes(), 1)],
    }
    return pb.TrainRequest(trainer_id=trainer_id, **{**chosen, **fields})


@st.composite
def train_fields(draw: st.DrawFn) -> dict[str, Any]:
    size = st.sampled_from([0, 1, 3, 4, 6, -1, 1 << 40, -(1 << 63), (1 << 63) - 1])
    spec = st.builds(tensor_pb2.TensorSpec, dtype=st.integers(0, 20), shape=st.lists(size, max_size=9))
    label = st.integers(-2, 5) | INT64
    fields: dict[str, st.SearchStrategy[Any]] = {
        "kind": st.integers(0, 5),
        "number": INT64,
        "inputs": st.lists(st.builds(lambda s: tensor(s.shape, s.dtype, "x"), spec), max_size=3),
        "targets": st.lists(st.builds(pb.Target, name=TEXT, tensor=spec), max_size=3),
        "chunks": st.lists(
            st.builds(chunk, st.binary(max_size=64), st.integers(0, 4), st.sampled_from([0, 1, 1 << 62])),
            max_size=3,
        ),
        "labels": st.lists(label, min_size=4, max_size=4),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3, unique=True))
    found = {field: draw(fields[field]) for field in chosen}
    labels = found.pop("labels", None)
    if labels is not None:
        numbers = b"".join(label.to_bytes(8, "little", signed=True) for label in labels)
        found["chunks"] = [chunk(BATCH[0].tobytes(), 0), chunk(numbers, 1)]
    return found


@many
@given(fields=train_fields())
def test_any_batch_is_answered(
    channel: grpc.Channel, trainer: trocar.training.Trainer, fields: dict[str, Any]
) -> None:
    answered(channel, "TrainerService/Train", train_request(trainer.trainer_id, **fields).SerializeToString())
    assert trainer.step(*labelled(), number=trainer.info().next_number).is_update


@pytest.mark.parametrize("length", [64, 65])
def test_a_request_id_is_taken_whole_or_refused(
    channel: grpc.Channel, trainer: trocar.training.Trainer, length: int
) -> None:
    request = fit_pb2.StartFitRequest(trainer_id=trainer.trainer_id, request_id="a" * length)
    request.spec.dataset_id = "0" * 32
    request.spec.epochs = request.spec.batch_size = 1
    with pytest.raises(grpc.RpcError) as caught:
        unary_call(channel, "FitService/StartFit", request.SerializeToString())
    assert ("request_id" in (caught.value.details() or "")) == (length > 64)


def labelled() -> tuple[Any, Any]:
    images, labels = BATCH
    return images, labels % 3


@many
@given(data=st.data())
def test_any_description_of_a_fit_is_answered(
    channel: grpc.Channel,
    client: trocar.Client,
    trainer: trocar.training.Trainer,
    dataset_id: str,
    data: st.DataObject,
) -> None:
    chosen = data.draw(st.lists(st.sampled_from(sorted(FITS)), max_size=3, unique=True))
    ids = st.sampled_from([dataset_id] * 5 + ["", "0" * 32, "../x"])
    fields: dict[str, Any] = {field: data.draw(FITS[field]) for field in chosen}
    eval_id = data.draw(st.just("") | ids)
    spec = fit_pb2.FitSpec(dataset_id=data.draw(ids), eval_dataset_id=eval_id, **fields)
    fitting = trocar.training.Trainer(client, made_of_four(client))
    request = fit_pb2.StartFitRequest(trainer_id=fitting.trainer_id, spec=spec)
    reply = answered(channel, "FitService/StartFit", request.SerializeToString())
    if reply is not None:
        number = fit_pb2.StartFitResponse.FromString(reply[0]).first_event_number
        for event in fitting.watch(number):
            assert event.get("reason") != "INTERNAL", event
            if event.number > number + 30:
                fitting.cancel()
                break
    fitting.close()


def made_of_four(client: trocar.Client) -> str:
    return make_trainer(client).trainer_id


@many
@given(
    message=st.binary(max_size=200),
    method=st.sampled_from(
        [
            "TrainerService/Train",
            "TrainerService/CreateTrainer",
            "TrainerService/SaveTrainer",
            "TrainerService/RestoreTrainer",
            "TrainerService/ExportTrainer",
            "TrainerService/PublishTrainer",
            "TrainerService/StepOptimizer",
            "FitService/StartFit",
            "FitService/WatchFit",
            "FitService/ControlFit",
        ]
    ),
)
def test_any_bytes_are_answered(channel: grpc.Channel, message: bytes, method: str) -> None:
    answered(channel, method, message)


def deep(depth: int) -> Struct:
    found = struct({"lr": 0.1})
    for _ in range(depth):
        found = Struct(fields={"x": Value(struct_value=found)})
    return found


LARGE: dict[str, pb.TrainerSpec] = {
    "a million selectors": pb.TrainerSpec(model_id="tiny", trainable=["a"] * 600_000),
    "selectors that are all different": pb.TrainerSpec(
        model_id="tiny", trainable=[f"a{i}" for i in range(200_000)]
    ),
    "selectors that match": pb.TrainerSpec(model_id="tiny", trainable=["**"] * 500_000),
    "losses": pb.TrainerSpec(model_id="tiny", losses=[pb.LossSpec(name="mse")] * 200_000),
    "wrong losses": pb.TrainerSpec(model_id="tiny", losses=[pb.LossSpec(name="x")] * 200_000),
    "rules": pb.TrainerSpec(
        model_id="tiny", gradient_edits=[pb.GradientEditSpec(selector="fc", name="zero")] * 150_000
    ),
    "edits": pb.TrainerSpec(
        model_id="tiny",
        edits=[edit_pb2.Edit(selector="conv", direction=edit_pb2.DirectionEdit(name="axis"))] * 150_000,
    ),
    "groups": pb.TrainerSpec(
        model_id="tiny",
        optimizer=pb.OptimizerSpec(groups=[pb.ParameterGroupSpec(parameters=["fc"])] * 150_000),
    ),
    "penalties": pb.TrainerSpec(
        model_id="tiny", regularizers=[pb.RegularizerSpec(parameters=["fc"])] * 150_000
    ),
    "hidden layers": pb.TrainerSpec(model_id="tiny", head=pb.HeadSpec(classes=3, hidden=[1_000_000] * 1000)),
    "narrow hidden layers": pb.TrainerSpec(
        model_id="tiny", head=pb.HeadSpec(classes=3, hidden=[1] * 500_000)
    ),
    "a large head": pb.TrainerSpec(model_id="tiny", head=pb.HeadSpec(classes=1_000_000, hidden=[1_000_000])),
    "deep options": pb.TrainerSpec(model_id="tiny", optimizer=pb.OptimizerSpec(options=deep(30))),
    "many options": pb.TrainerSpec(
        model_id="tiny", optimizer=pb.OptimizerSpec(options=struct({f"o{i}": 1.0 for i in range(50_000)}))
    ),
    "a long list": pb.TrainerSpec(
        model_id="tiny",
        losses=[pb.LossSpec(name="cross_entropy", options=struct({"class_weights": [1.0] * 100_000}))],
    ),
    "a long text": pb.TrainerSpec(model_id="tiny", trainable=["(" * 2_000_000]),
    "many stars": pb.TrainerSpec(model_id="tiny", trainable=["*a" * 500_000]),
    "a long name": pb.TrainerSpec(model_id="x" * 2_000_000),
}


@pytest.mark.parametrize("spec", LARGE.values(), ids=LARGE)
def test_what_is_large_is_refused_soon(
    channel: grpc.Channel, trainer: trocar.training.Trainer, spec: pb.TrainerSpec
) -> None:
    request = pb.CreateTrainerRequest(spec=spec).SerializeToString()
    assert answered(channel, "TrainerService/CreateTrainer", request) is None
    assert trainer.step(*labelled(), number=trainer.info().next_number).is_update


def test_refusals_cost_no_memory(channel: grpc.Channel, trainer: trocar.training.Trainer) -> None:
    request = pb.CreateTrainerRequest(spec=LARGE["losses"]).SerializeToString()
    wrong = train_request(trainer.trainer_id, number=5, kind=9).SerializeToString()

    def refused() -> None:
        for _ in range(10):
            answered(channel, "TrainerService/CreateTrainer", request)
            answered(channel, "TrainerService/Train", wrong)

    refused()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10  # in KiB


def test_options_that_are_nested_without_end_are_refused(channel: grpc.Channel) -> None:
    options = b""
    for _ in range(5000):
        field = b"\x2a" + _varint(len(options)) + options  # Value.struct_value
        entry = b"\x0a\x01x\x12" + _varint(len(field)) + field
        options = b"\x0a" + _varint(len(entry)) + entry  # Struct.fields
    optimizer = b"\x12" + _varint(len(options)) + options
    spec = b"\x0a\x04tiny\x3a" + _varint(len(optimizer)) + optimizer
    message = b"\x0a" + _varint(len(spec)) + spec
    assert answered(channel, "TrainerService/CreateTrainer", message) is None


def _varint(number: int) -> bytes:
    found = b""
    while number > 127:
        found += bytes([number & 127 | 128])
        number >>= 7
    return found + bytes([number])
