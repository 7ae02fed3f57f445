"""Every number of every message at -1, its least and its most: answered, or refused by name; health goes on.

Calls are derived from the descriptors, so a new field is tried without a line here. A request is tried twice:
as it is, and with the number in it. Where it is right without, an error has to name the number's field.
"""

import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

import trocar
from tests.support.models.trainable_nets import CLASSES, SHAPE, TinyNet
from tests.support.servers.server_processes import ServerProcess, server_processes
from tests.support.servers.serving import custom
from tests.support.wire.methods import HEALTH, OPEN_INFERENCE, OWN, REFLECTION, Method
from tests.support.wire.provoked import everything_said, request_of
from tests.support.wire.signed_fields import FieldPath, number_paths, values_of, with_parents, with_value
from tests.support.wire.wire import chunk, raw_channel, tensor
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import (
    dataset_pb2,
    edit_pb2,
    edit_store_pb2,
    extraction_pb2,
    fit_pb2,
    objective_pb2,
    prepared_pb2,
    reduction_pb2,
    statistics_pb2,
    stream_pb2,
    tap_pb2,
    tensor_pb2,
    trainer_pb2,
)
from trocar_server.rpc.oip.oip_messages import SERVICE, message_class

WITHIN_S = 20
METHODS = (*OWN, *OPEN_INFERENCE, *HEALTH, *REFLECTION)
DEFECTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
BATCH = np.zeros((2, *SHAPE), np.float32)
LABELS = np.zeros(2, np.int64)
WAITS = {"WatchFit"}
"""Of an event that is still to come: it waits as long as the caller does."""


def _samples() -> dict[str, Message]:
    """Return messages that are right at least in one place, for those on the way to a number."""
    samples: list[Message] = [
        tap_pb2.Tap(selector="conv"),
        _zero(),
        edit_pb2.NoiseEdit(kind=edit_pb2.NOISE_KIND_GAUSSIAN, scale=1, seed=1),
        edit_pb2.DropoutEdit(probability=0.5, seed=1),
        edit_pb2.TopKEdit(k=1),
        edit_pb2.ClampEdit(low=0, high=1),
        edit_pb2.NormaliseEdit(max_norm=1, scope=edit_pb2.NORM_SCOPE_SAMPLE),
        edit_pb2.Operand(constant=1),
        reduction_pb2.TakeReduction(axis=reduction_pb2.AXIS_CHANNELS, positions=[0]),
        reduction_pb2.CropReduction(height=1, width=1),
        reduction_pb2.PoolReduction(kind=reduction_pb2.POOL_KIND_AVG, size=[1, 1]),
        reduction_pb2.TopKReduction(k=1),
        reduction_pb2.ProjectionReduction(component_count=1, seed=1),
        reduction_pb2.IndexItem(position=0),
        statistics_pb2.Histogram(edges=[0, 1, 2]),
        objective_pb2.ObjectiveTerm(class_score=objective_pb2.ClassScore(classes=[0])),
        objective_pb2.ClassScore(classes=[0]),
        tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[1]),
        trainer_pb2.HeadSpec(classes=CLASSES),
        trainer_pb2.LossSpec(name="cross_entropy"),
        trainer_pb2.RegularizerSpec(norm="l2", weight=0.1),
        trainer_pb2.ScheduleSpec(name="constant"),
        fit_pb2.EarlyStopSpec(patience=1),
    ]
    return {sample.DESCRIPTOR.full_name: sample for sample in samples}


EXTRACT = extraction_pb2.ExtractRequest(
    model_id="tiny",
    taps=[tap_pb2.Tap(selector="conv")],
    inputs=[tensor(BATCH.shape)],
    chunks=[chunk(BATCH.tobytes())],
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    models = {"tiny": custom(TinyNet, SHAPE)}
    with server_processes() as processes:
        yield processes.start(
            tmp_path_factory.mktemp("data"), models=models, limits={"max_trainers": 1000}, reflection=True
        )


@pytest.fixture(scope="module")
def trainer_ids(server: ServerProcess) -> Iterator[list[str]]:
    """A trainer that has had a fit, so that it has events and a checkpoint, and one that has neither."""
    with trocar.connect(server.address) as client:
        trained, fresh = (client.train("tiny", trainable=["fc"]) for _ in range(2))
        data = np.zeros((4, *SHAPE), np.float32), np.zeros(4, np.int64)
        trained.fit(data, epochs=1, batch_size=2)
        trained.save()
        yield [trained.trainer_id, fresh.trainer_id]


@pytest.fixture
def watched(server: ServerProcess) -> Iterator[None]:
    """Health is asked for all the time."""
    problems: list[str] = []
    over = threading.Event()

    def look() -> None:
        with raw_channel(server.address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)
            while not over.wait(0.02):
                try:
                    health.Check(health_pb2.HealthCheckRequest(), timeout=WITHIN_S)
                except grpc.RpcError as error:
                    problems.append(str(error))
                    return

    looking = threading.Thread(target=look)
    looking.start()
    yield
    over.set()
    looking.join()
    assert not problems, "\n".join(problems)


def messages_of(method: Method, trainer_id: str) -> list[Any]:
    """Return the messages of a right call, or of one as right as can be; numbers are put into the first."""
    if method.service == SERVICE.full_name:
        return _open_inference(method)
    start = stream_pb2.ExtractStreamStart(model_id="tiny", taps=EXTRACT.taps)
    batch = stream_pb2.StreamBatch(inputs=EXTRACT.inputs)
    sent: dict[str, list[Any]] = {
        "Extract": [EXTRACT],
        "Plan": [extraction_pb2.PlanRequest(extraction=EXTRACT)],
        "ExtractStream": [
            stream_pb2.ExtractStreamRequest(start=start),
            stream_pb2.ExtractStreamRequest(batch=batch, chunks=EXTRACT.chunks),
        ],
        "StoreEdits": [
            edit_store_pb2.StoreEditsRequest(model_id="tiny", name="name", edits=[_zero()], is_replacing=True)
        ],
        "PrepareCalls": [prepared_pb2.PrepareCallsRequest(request=EXTRACT.SerializeToString())],
        "CreateTrainer": [trainer_pb2.CreateTrainerRequest(spec=_trainer())],
        "Train": [
            trainer_pb2.TrainRequest(
                trainer_id=trainer_id,
                kind=trainer_pb2.TRAIN_KIND_EVALUATE,
                inputs=EXTRACT.inputs,
                targets=[
                    trainer_pb2.Target(
                        tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=LABELS.shape)
                    )
                ],
                chunks=[*EXTRACT.chunks, chunk(LABELS.tobytes(), 1)],
            )
        ],
        "BeginUpload": [dataset_pb2.BeginUploadRequest(manifest=_manifest())],
    }
    return sent.get(method.name) or [_filled(request_of(method), trainer_id)]


def _zero() -> edit_pb2.Edit:
    return edit_pb2.Edit(selector="conv", zero=edit_pb2.ZeroEdit())


def _trainer() -> trainer_pb2.TrainerSpec:
    return trainer_pb2.TrainerSpec(model_id="tiny", trainable=["fc"])


def _manifest() -> dataset_pb2.DatasetManifest:
    shard = dataset_pb2.DatasetShard(sha256="0" * 64, byte_count=100, sample_count=1)
    return dataset_pb2.DatasetManifest(name="name", sample_count=1, shards=[shard])


def _filled(request: Any, trainer_id: str) -> Any:
    """Set the ids that a request has."""
    for name, value in {"model_id": "tiny", "trainer_id": trainer_id}.items():
        if name in request.DESCRIPTOR.fields_by_name:
            setattr(request, name, value)
    return request


def _open_inference(method: Method) -> list[Any]:
    request = message_class(SERVICE.methods_by_name[method.name].input_type)()
    if method.name.endswith("Infer"):
        request.model_name = "tiny"
        given = request.inputs.add(name="x", datatype="FP32", shape=BATCH.shape)
        given.contents.fp32_contents.extend(BATCH.reshape(-1).tolist())
        request.parameters["timeout"].int64_param = 10_000_000
    return [request]


SAMPLES = _samples()


def _all_cases(method: Method, trainer_ids: list[str]) -> Iterator[tuple[FieldPath, Any, list[Any]]]:
    """Yield the cases of a method; where it is about a trainer, with each of them."""
    is_of_trainers = "trainer_id" in messages_of(method, "")[0].DESCRIPTOR.fields_by_name
    for trainer_id in trainer_ids if is_of_trainers else trainer_ids[:1]:
        yield from _cases(method, trainer_id)


def _cases(method: Method, trainer_id: str) -> Iterator[tuple[FieldPath, Any, list[Any]]]:
    """Yield the path of each number, each value, and the messages of the call."""
    base = messages_of(method, trainer_id)
    for index, message in enumerate(base):
        for path in number_paths(message.DESCRIPTOR):
            if index and path[0].name == "start":
                continue  # tried in the first message
            control = [*base[:index], with_parents(message, path, SAMPLES), *base[index + 1 :]]
            yield path, None, control
            for value in values_of(path[-1]):
                changed = with_value(message, path, value, SAMPLES)
                yield path, value, [*base[:index], changed, *base[index + 1 :]]


def _is_named(path: FieldPath, value: Any, said: str) -> bool:
    """Whether an error names a field on the way to the number, its value, or the edit that it is of.

    A limit of the bytes of all payloads together has no field.
    """
    names = [*(field.name for field in path), str(value), "'conv': ", ErrorReason.REQUEST_TOO_LARGE.value]
    return any(name in said for name in names)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.path)
def test_every_number_is_answered_or_refused_by_name(
    server: ServerProcess, trainer_ids: list[str], method: Method
) -> None:
    problems: list[str] = []
    with raw_channel(server.address) as channel:
        is_right = False
        for path, value, messages in _all_cases(method, trainer_ids):
            waits = method.name in WAITS
            call = _made(channel, method, messages, 1 if waits else WITHIN_S)
            code, said = call.code(), everything_said(call)
            if value is None:
                is_right = code is grpc.StatusCode.OK
            is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
            is_refused = code is not grpc.StatusCode.OK and not is_late
            is_unnamed = is_right and is_refused and not _is_named(path, value, said)
            if code in DEFECTS or is_unnamed or (is_late and not waits):
                problems.append(f"{'.'.join(field.name for field in path)} = {value}: {code} {said[:200]}")
    assert not problems, "\n".join(problems)


def _made(channel: grpc.Channel, method: Method, messages: list[Any], timeout_s: float) -> Any:
    return method.call(channel, [message.SerializeToString() for message in messages], timeout=timeout_s)
