"""The Open Inference Protocol against a real server; what is computed is held against torch."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from structlog.testing import capture_logs

import trocar
from tests.support.models.tiny_models import Plain, Structured
from tests.support.oracles.oracle import hooked_outputs, noise, rebuilt_by_name, same_bits
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt
from tests.support.wire.open_inference import DATATYPES, arrays_of, ask, infer, info_of, request_of, stream
from tests.support.wire.pictures import encoded, photo
from tests.support.wire.wire import raw_channel
from trocar_server import __version__
from trocar_server.rpc.oip.oip_messages import SERVICE, ModelInferRequest

IMAGES = noise(2, 3, 8, 8)
ROWS = noise(2, 3)


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    """One whose models come and go."""
    preprocessing: Any = {"resize": (8,), "crop": (8,)}
    models: dict[str, Any] = {
        "plain": custom(Plain, (3, 8, 8)),
        "pictures": custom(Plain, (3, 8, 8), preprocessing=preprocessing),
        "resnet18": {"weights": "random:0"},
        "detector": {"architecture": "ssdlite320_mobilenet_v3_large", "weights": "random:0"},
    }
    with running_server(models=models, device="cpu", reflection=True) as running:
        yield running


@pytest.fixture
def own(own_server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(own_server.address) as opened:
        yield opened


# --- Inference ---


def test_the_models_output_has_torchs_bits(channel: grpc.Channel) -> None:
    response = infer(channel, request_of("plain", {"x": IMAGES}, id="a 7"))
    assert (response.model_name, response.model_version, response.id) == ("plain", "1", "a 7")
    with torch.inference_mode():
        expected = rebuilt(Plain)(torch.from_numpy(IMAGES))
    found = arrays_of(response)
    assert list(found) == ["/out"]
    assert same_bits(found["/out"], expected)
    assert response.parameters["numerics"].string_param == "exact"


def test_taps_of_a_torchvision_model_have_torchs_bits(own: grpc.Channel) -> None:
    batch = noise(2, 3, 64, 64)
    names = ["layer4", "avgpool", "bn1", "layer1.0.relu@1"]
    found = arrays_of(infer(own, request_of("resnet18", {"x": batch}, names)))
    expected = hooked_outputs(
        rebuilt_by_name("resnet18"), [batch], ["layer4", "avgpool", "bn1", "layer1.0.relu"]
    )
    assert list(found) == names
    for name in names:
        path, _, call = name.partition("@")
        assert same_bits(found[name], expected[path, int(call or 0), ""]), name


def test_statistics_equal_those_of_our_own_client(channel: grpc.Channel, client: trocar.Client) -> None:
    names = ["conv:mean", "conv:std:channel", "conv:max:sample", "conv", "fc:zero_fraction"]
    found = arrays_of(infer(channel, request_of("plain", {"x": IMAGES}, names)))
    assert list(found) == names
    for over in ("all", "channel", "sample"):
        tap = trocar.tap("conv", stats=["mean", "std", "max"], values=False, over=over)
        expected = client.extract("plain", IMAGES, taps=[tap]).stats["conv"]
        for name, array in found.items():
            path, _, rest = name.partition(":")
            statistic, _, scope = rest.partition(":")
            if path == "conv" and statistic and (scope or "all") == over:
                assert array.dtype == np.float64
                assert np.array_equal(array, np.atleast_1d(getattr(expected, statistic)))
    assert np.array_equal(found["conv"], client.extract("plain", IMAGES, taps="conv")["conv"])


def test_a_pattern_comes_back_under_the_names_of_its_values(channel: grpc.Channel) -> None:
    found = arrays_of(infer(channel, request_of("plain", {"x": IMAGES}, ["*:Conv2d:mean", "relu@*", "conv"])))
    assert list(found) == ["conv:mean", "conv2:mean", "relu@0", "relu@1", "conv"]
    assert abs(found["conv:mean"][0] - found["conv"].mean(dtype=np.float64)) < 1e-12


def test_one_value_may_be_asked_for_in_every_way_at_once(channel: grpc.Channel) -> None:
    names = ["fc", "#-1:mean", "fc:std", "fc:std:sample", "*:Linear:max", "fc:mean", "fc@0:mean:channel"]
    found = arrays_of(infer(channel, request_of("plain", {"x": IMAGES}, names)))
    assert list(found) == names
    assert found["#-1:mean"] == found["fc:mean"]
    assert abs(found["fc:mean"][0] - found["fc"].mean(dtype=np.float64)) < 1e-12
    assert found["*:Linear:max"] == found["fc"].max()


def test_a_value_under_two_names_comes_under_both(channel: grpc.Channel) -> None:
    found = arrays_of(infer(channel, request_of("plain", {"x": IMAGES}, ["#-1", "fc", "fc@0"])))
    assert list(found) == ["#-1", "fc", "fc@0"]
    assert np.array_equal(found["#-1"], found["fc"])
    assert np.array_equal(found["fc@0"], found["fc"])


def test_what_a_pattern_names_again_comes_once(channel: grpc.Channel) -> None:
    found = infer(channel, request_of("plain", {"x": IMAGES}, ["conv", "conv*"]))
    assert [output.name for output in found.outputs] == ["conv", "conv2"]


def test_outputs_of_a_dict_have_names_that_can_be_asked_for(channel: grpc.Channel) -> None:
    found = arrays_of(infer(channel, request_of("structured", {"x": ROWS})))
    assert list(found) == ['/out["out"]', '/out["aux"]']
    expected = rebuilt(Structured)(torch.from_numpy(ROWS))
    assert same_bits(found['/out["aux"]'], expected["aux"])
    again = arrays_of(infer(channel, request_of("structured", {"x": ROWS}, ['/out["out"]'])))
    assert np.array_equal(again['/out["out"]'], found['/out["out"]'])


def test_inputs_go_to_the_arguments_of_their_names(channel: grpc.Channel) -> None:
    with torch.inference_mode():
        many = rebuilt(_many())
        x, y, scale = (torch.from_numpy(noise(2, size, seed=size)) for size in (3, 3, 2))
        expected = many(x, y=y + 1, scale=scale)
    inputs = {"scale": scale.numpy(), "y": (y + 1).numpy(), "x": x.numpy()}
    assert same_bits(arrays_of(infer(channel, request_of("many", inputs)))["/out"], expected)


def _many() -> Any:
    from tests.support.models.odd_models import TakesMany

    return TakesMany


def test_a_detector_takes_a_batch_and_returns_lists(own: grpc.Channel, own_server: RunningServer) -> None:
    batch = noise(2, 3, 320, 320)
    found = arrays_of(infer(own, request_of("detector", {"images": batch})))
    with trocar.connect(own_server.address) as connected:
        expected = connected.extract("detector", batch, taps="/out")
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    assert found['/out[0]["labels"]'].dtype == np.int64


@pytest.mark.parametrize("kind", DATATYPES)
def test_every_datatype_goes_in_and_out(channel: grpc.Channel, kind: str) -> None:
    array = (noise(2, 3) * 200 - (0 if kind[0] in "ub" else 100)).astype(kind)
    found = arrays_of(infer(channel, request_of("identity", {"x": array})))["/out"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


@pytest.mark.parametrize("kind", [kind for kind in DATATYPES if kind != "float16"])
def test_typed_elements_are_the_same_as_bytes(channel: grpc.Channel, kind: str) -> None:
    limits = np.iinfo(kind) if "int" in kind else None
    numbers = [0, 1, 1, limits.min, limits.max, 0] if limits else [0, 1, 1, 0.1, -2.5, 0]
    array = np.array(numbers, kind).reshape(2, 3)
    field = {"bool": "bool_contents", "float32": "fp32_contents", "float64": "fp64_contents"}.get(kind)
    wide = "64" if kind.endswith("64") else ""
    field = field or f"{'u' if kind[0] == 'u' else ''}int{wide}_contents"
    request = ModelInferRequest(model_name="identity")
    request.inputs.add(
        name="x", datatype=DATATYPES[kind], shape=[2, 3], contents={field: array.reshape(-1).tolist()}
    )
    found = arrays_of(infer(channel, request))["/out"]
    assert found.dtype == array.dtype
    assert np.array_equal(found, array)


def test_bfloat16_travels_as_its_bits(channel: grpc.Channel) -> None:
    bits = (noise(2, 3).view(np.uint32) >> 16).astype(np.uint16)
    request = ModelInferRequest(model_name="identity", raw_input_contents=[bits.tobytes()])
    request.inputs.add(name="x", datatype="BF16", shape=[2, 3])
    response = infer(channel, request)
    assert response.outputs[0].datatype == "BF16"
    assert np.array_equal(arrays_of(response)["/out"], bits)


def test_not_a_number_travels(channel: grpc.Channel) -> None:
    odd = np.array([[np.nan, np.inf, -np.inf], [-0.0, 1e-45, 3e38]], np.float32)
    assert arrays_of(infer(channel, request_of("identity", {"x": odd})))["/out"].tobytes() == odd.tobytes()


def test_an_input_larger_than_our_own_messages_comes_in_one(channel: grpc.Channel) -> None:
    large = noise(2000, 3, 500)
    found = arrays_of(infer(channel, request_of("identity", {"x": large}, ["/out:count"])))
    assert large.nbytes > 11 << 20
    assert found["/out:count"] == [large.size]


@pytest.mark.parametrize("is_raw", [True, False])
def test_images_are_prepared_by_the_server(
    own: grpc.Channel, own_server: RunningServer, is_raw: bool
) -> None:
    images = [encoded(photo(seed=seed), kind) for seed, kind in enumerate(("PNG", "JPEG"))]
    request = ModelInferRequest(model_name="pictures", outputs=[{"name": "conv"}])
    tensor = request.inputs.add(name="x", datatype="BYTES", shape=[2])
    if is_raw:
        request.raw_input_contents.append(
            b"".join(len(image).to_bytes(4, "little") + image for image in images)
        )
    else:
        tensor.contents.bytes_contents.extend(images)
    found = arrays_of(infer(own, request))["conv"]
    with trocar.connect(own_server.address) as connected:
        assert np.array_equal(found, connected.extract("pictures", images, taps="conv")["conv"])


# --- Streams ---


def test_a_stream_answers_in_order_and_goes_on_after_a_failure(channel: grpc.Channel) -> None:
    requests = [request_of("plain", {"x": noise(1, 3, 8, 8, seed=seed)}, id=str(seed)) for seed in range(6)]
    requests[2].model_name = "plane"
    requests[4].inputs[0].shape[0] = 7
    answers = list(stream(channel, requests))
    assert [answer.infer_response.id for answer in answers] == list("012345")
    assert [bool(answer.error_message) for answer in answers] == [False, False, True, False, True, False]
    assert "nearest: plain" in answers[2].error_message
    assert answers[2].infer_response.parameters["reason"].string_param == "UNKNOWN_MODEL"
    assert "inputs[0].shape" in answers[4].error_message
    for seed in (0, 1, 3, 5):
        alone = infer(channel, requests[seed])
        assert answers[seed].infer_response.raw_output_contents == alone.raw_output_contents


def test_a_stream_ends_at_what_is_no_request(channel: grpc.Channel) -> None:
    answers = stream(channel, [request_of("plain", {"x": IMAGES}), b"\xff" * 9])
    with pytest.raises(grpc.RpcError) as caught:
        list(answers)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_defect_fails_its_request_and_not_the_stream(
    channel: grpc.Channel, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    extract, calls = server.engine.extract, []

    async def fails_once(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise KeyError("secret")
        return await extract(*arguments)

    monkeypatch.setattr(server.engine, "extract", fails_once)
    with capture_logs() as lines:
        first, second = stream(channel, [request_of("plain", {"x": IMAGES})] * 2)
    assert "secret" not in first.error_message
    assert first.infer_response.parameters["reason"].string_param == "INTERNAL"
    assert not second.error_message
    assert "defect in a stream" in [line["event"] for line in lines]


def test_a_deadline_of_its_own_stops_a_request(channel: grpc.Channel) -> None:
    request = request_of("plain", {"x": IMAGES})
    request.parameters["timeout"].int64_param = 1
    with pytest.raises(grpc.RpcError) as caught:
        infer(channel, request)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert info_of(caught.value).reason == "DEADLINE_EXCEEDED"


def test_numerics_are_those_that_the_request_takes(serve: Serve) -> None:
    """Asked as often as it takes to have a form built, tried and used."""
    engine = {"compile_after": 1, "min_gain": 0.0}
    running = serve(models={"plain": custom(Plain, (3, 8, 8))}, engine=engine)
    build_here(running)
    names = ["conv", "fc", "fc:mean"]
    with raw_channel(running.address) as channel:
        exact = arrays_of(infer(channel, request_of("plain", {"x": IMAGES}, names)))
        request = request_of("plain", {"x": IMAGES}, names, parameters={"numerics": {"string_param": "fast"}})
        response = infer(channel, request)
        for _ in range(7):
            response = infer(channel, request)
            running.run(running.engine.compiled.settled)
    assert response.parameters["numerics"].string_param == "fast"
    assert response.parameters["engine"].string_param != "eager"
    found = arrays_of(response)
    assert list(found) == names
    for name in names:
        assert np.linalg.norm(found[name] - exact[name]) <= 1e-5 * np.linalg.norm(exact[name])


# --- Server, models, repository ---


def test_the_server_is_alive_and_ready(channel: grpc.Channel) -> None:
    assert ask(channel, "ServerLive").live
    assert ask(channel, "ServerReady").ready
    found = ask(channel, "ServerMetadata")
    assert (found.name, found.version) == ("trocar", __version__)
    assert "statistics" in found.extensions


@pytest.mark.parametrize(
    ("name", "version", "expected"),
    [("plain", "", True), ("plain", "1", True), ("plain", "2", False), ("plane", "", False)],
)
def test_a_model_is_ready_or_not(channel: grpc.Channel, name: str, version: str, expected: bool) -> None:
    assert ask(channel, "ModelReady", {"name": name, "version": version}).ready is expected


def tensors(found: Any) -> list[tuple[str, str, list[int]]]:
    return [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in found]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("plain", [("x", "FP32", [-1, 3, 8, 8])], [("/out", "FP32", [-1, 5])]),
        (
            "structured",
            [("x", "FP32", [-1, 3])],
            [('/out["out"]', "FP32", [-1, 3]), ('/out["aux"]', "FP32", [-1, 3])],
        ),
        ("half", [("x", "FP32", [-1, 7])], [("/out", "BF16", [7, 1])]),
    ],
)
def test_metadata_name_what_requests_can_name(
    channel: grpc.Channel, name: str, inputs: list[Any], outputs: list[Any]
) -> None:
    found = ask(channel, "ModelMetadata", {"name": name})
    assert (found.name, list(found.versions)) == (name, ["1"])
    assert tensors(found.inputs) == inputs
    assert tensors(found.outputs) == outputs
    config = ask(channel, "ModelConfig", {"name": name}).config
    assert (config.name, config.max_batch_size, config.backend) == (name, 4096, "pytorch")
    assert [(entry.name, list(entry.dims)) for entry in config.input] == [(n, s[1:]) for n, _, s in inputs]
    assert [(entry.name, list(entry.dims)) for entry in config.output] == [(n, s[1:]) for n, _, s in outputs]
    rows = noise(2, *inputs[0][2][1:])
    assert list(arrays_of(infer(channel, request_of(name, {"x": rows})))) == [n for n, _, _ in outputs]


def test_a_detectors_metadata_leave_open_what_depends_on_the_data(own: grpc.Channel) -> None:
    found = ask(own, "ModelMetadata", {"name": "detector"})
    assert tensors(found.inputs) == [("images", "FP32", [-1, 3, 224, 224])]
    assert ('/out[0]["boxes"]', "FP32", [-1, 4]) in tensors(found.outputs)


def test_models_are_listed_loaded_and_unloaded(own: grpc.Channel) -> None:
    def states(**fields: Any) -> dict[str, str]:
        return {model.name: model.state for model in ask(own, "RepositoryIndex", fields).models}

    everything = {"detector", "pictures", "plain", "resnet18"}
    assert states() == dict.fromkeys(everything, "READY")
    ask(own, "RepositoryModelUnload", {"model_name": "plain"})
    assert not ask(own, "ModelReady", {"name": "plain"}).ready
    assert states()["plain"] == "UNAVAILABLE"
    assert set(states(ready=True)) == everything - {"plain"}
    with pytest.raises(grpc.RpcError) as caught:
        infer(own, request_of("plain", {"x": IMAGES}))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    ask(own, "RepositoryModelLoad", {"model_name": "plain"})
    assert infer(own, request_of("plain", {"x": IMAGES})).outputs


def test_a_torchvision_model_is_loaded_by_name_with_weights(serve: Serve) -> None:
    with raw_channel(serve(models={}).address) as channel:
        ask(
            channel,
            "RepositoryModelLoad",
            {"model_name": "squeezenet1_1", "parameters": {"weights": {"string_param": "random:3"}}},
        )
        assert ask(channel, "ModelReady", {"name": "squeezenet1_1"}).ready


def test_statistics_count_what_was_asked(serve: Serve) -> None:
    with raw_channel(serve(models={"plain": custom(Plain, (3, 8, 8))}).address) as channel:
        for size in (2, 2, 3):
            infer(channel, request_of("plain", {"x": noise(size, 3, 8, 8)}))
        list(stream(channel, [request_of("plain", {"x": noise(1, 3, 8, 8)}, ["nowhere"])]))
        with pytest.raises(grpc.RpcError):
            infer(channel, request_of("nowhere", {"x": IMAGES}))
        (found,) = ask(channel, "ModelStatistics").model_stats
        assert ask(channel, "ModelStatistics", {"name": "plain"}).model_stats == [found]
    assert (found.name, found.inference_count, found.execution_count) == ("plain", 7, 3)
    stats = found.inference_stats
    assert (stats.success.count, stats.fail.count, stats.compute_infer.count) == (3, 1, 3)
    parts = (stats.queue, stats.compute_input, stats.compute_infer, stats.compute_output)
    assert abs(stats.success.ns - sum(part.ns for part in parts)) <= 12  # of rounding
    assert all(part.ns > 0 for part in (*parts, stats.fail))
    assert [(batch.batch_size, batch.compute_infer.count) for batch in found.batch_stats] == [(2, 2), (3, 1)]
    assert found.memory_usage[0].type == "CPU"
    assert found.last_inference > 0


def test_another_callers_trainer_is_not_there(serve: Serve) -> None:
    running = serve(models={"plain": custom(Plain, (3, 8, 8))})
    mine, other = [[("authorization", f"Bearer {name}")] for name in ("alice", "bob")]
    with trocar.connect(running.address, token="alice") as client, raw_channel(running.address) as channel:
        trainer = client.train("plain", trainable=["fc"], optimizer=trocar.training.sgd(lr=0.1))
        name = trainer.trainer_id
        request = request_of(name, {"x": IMAGES})
        found = arrays_of(infer(channel, request, metadata=mine))["/out"]
        assert same_bits(found, rebuilt(Plain)(torch.from_numpy(IMAGES)).detach())
        assert ask(channel, "ModelReady", {"name": name}, metadata=mine).ready
        assert not ask(channel, "ModelReady", {"name": name}, metadata=other).ready
        for method in ("ModelMetadata", "ModelConfig", "ModelStatistics"):
            with pytest.raises(grpc.RpcError) as caught:
                ask(channel, method, {"name": name}, metadata=other)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as caught:
            infer(channel, request, metadata=other)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        listed = ask(channel, "ModelStatistics", metadata=other).model_stats
        assert [found.name for found in listed] == ["plain"]


NOT_THERE = [
    *(
        f"{kind}SharedMemory{verb}"
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    ),
    *("TraceSetting", "LogSettings"),
]


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_is_not_offered_says_so(channel: grpc.Channel, name: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel, name)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert f"{name} is not offered" in str(caught.value.details())
    assert info_of(caught.value).reason == "UNIMPLEMENTED"


def test_each_call_is_logged(channel: grpc.Channel, server: RunningServer) -> None:
    with capture_logs() as lines:
        infer(channel, request_of("plain", {"x": IMAGES}))
        with pytest.raises(grpc.RpcError):
            infer(channel, request_of("plane", {"x": IMAGES}))
        server.run(_written)
    calls = [line for line in lines if line["event"] == "call"]
    assert {line["method"] for line in calls} == {f"/{SERVICE.full_name}/ModelInfer"}
    assert [(line["code"], line["model"]) for line in calls] == [("OK", "plain"), ("NOT_FOUND", "plane")]
    assert calls[0]["rows"] == len(IMAGES)


async def _written() -> None:
    """Let the loop write the lines that wait."""


# --- Reflection ---


def test_reflection_describes_this_protocol_and_our_own(own: grpc.Channel) -> None:
    symbols = [SERVICE.full_name, "trocar_api.v1.ExtractionService", "grpc.health.v1.Health"]
    questions = [reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol) for symbol in symbols]
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(own)
    pool: Any = descriptor_pool.DescriptorPool()
    seen: set[str] = set()
    for answer in stub.ServerReflectionInfo(iter(questions)):
        files = [
            descriptor_pb2.FileDescriptorProto.FromString(data)
            for data in answer.file_descriptor_response.file_descriptor_proto
        ]
        by_name = {file.name: file for file in files}
        for name in by_name:
            _add(pool, name, by_name, seen)
    service = pool.FindServiceByName(SERVICE.full_name)
    assert [method.name for method in service.methods] == [method.name for method in SERVICE.methods]
    assert pool.FindServiceByName("trocar_api.v1.ExtractionService").methods_by_name["Extract"]
    (listed,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    assert set(symbols) <= {service.name for service in listed.list_services_response.service}


def _add(pool: Any, name: str, files: dict[str, Any], seen: set[str]) -> None:
    """Add a file after those that it needs."""
    if name not in seen:
        seen.add(name)
        for needed in files[name].dependency:
            _add(pool, needed, files, seen)
        pool.AddSerializedFile(files[name].SerializeToString())
