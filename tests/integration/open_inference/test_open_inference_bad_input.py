"""Wrong requests of the Open Inference Protocol: each is told which field, and nothing is left behind."""

from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer
from tests.support.wire.open_inference import ask, infer, info_of, request_of
from tests.support.wire.wire import raw_channel
from trocar_server.rpc.oip.oip_messages import SERVICE, ModelInferRequest

pytestmark = pytest.mark.usefixtures("unharmed")

IMAGES = noise(2, 3, 8, 8)
Invalid, NotFound, Exhausted = "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED"
ROW = np.zeros((1, 3), np.float32)


def good(**fields: Any) -> Any:
    return request_of("structured", {"x": ROW}, **fields)


def with_shape(*shape: int, datatype: str = "FP32", raw: bytes = bytes(12)) -> Any:
    request = ModelInferRequest(model_name="structured", raw_input_contents=[raw])
    request.inputs.add(name="x", datatype=datatype, shape=shape)
    return request


def typed(datatype: str, shape: tuple[int, ...] = (1, 3), **contents: Any) -> Any:
    request = ModelInferRequest(model_name="structured")
    request.inputs.add(name="x", datatype=datatype, shape=shape, contents=contents)
    return request


def changed(change: Callable[[Any], Any]) -> Any:
    request = good()
    change(request)
    return request


CASES: dict[str, tuple[Any, str, str]] = {
    "no model": (request_of("", {"x": ROW}), Invalid, "model_name"),
    "an unknown model": (request_of("structred", {"x": ROW}), NotFound, ""),
    "a path as model": (request_of("../../etc/passwd", {"x": ROW}), NotFound, ""),
    "another version": (good(model_version="2"), NotFound, ""),
    "a model that is not loaded": (request_of("sleeping", {"x": IMAGES}), "FAILED_PRECONDITION", ""),
    "no inputs": (ModelInferRequest(model_name="structured"), Invalid, "inputs"),
    "too many inputs": (
        ModelInferRequest(model_name="structured", inputs=[{"name": str(i)} for i in range(99)]),
        Invalid,
        "inputs",
    ),
    "an unknown input": (request_of("structured", {"y": ROW}), Invalid, "inputs[0].name"),
    "an input twice": (
        changed(lambda r: (r.inputs.append(r.inputs[0]), r.raw_input_contents.append(bytes(12)))),
        Invalid,
        "inputs[1].name",
    ),
    "a long id": (good(id="x" * 2000), Invalid, "id"),
    "no datatype": (with_shape(1, 3, datatype=""), Invalid, "inputs[0].datatype"),
    "an unknown datatype": (with_shape(1, 3, datatype="FP8"), Invalid, "inputs[0].datatype"),
    "a negative size": (with_shape(-1, 3), Invalid, "inputs[0].shape"),
    "two negative sizes": (with_shape(-1, -3), Invalid, "inputs[0].shape"),
    "the least size": (with_shape(-(2**63), 3), Invalid, "inputs[0].shape"),
    "a huge size": (with_shape(2**62, 3), Invalid, "inputs[0].shape"),
    "a product that overflows to what came": (
        with_shape(2**62, 2**62, 2**62, 2**62, 3),
        Invalid,
        "inputs[0].shape",
    ),
    "too many dimensions": (with_shape(*[1] * 9), Invalid, "inputs[0].shape"),
    "an empty batch": (with_shape(0, 3, raw=b""), Invalid, "inputs[0].shape"),
    "a huge empty batch": (with_shape(2**62, 0, raw=b""), Exhausted, "inputs[0].shape"),
    "a batch over the limit": (with_shape(17, 3, raw=bytes(17 * 12)), Exhausted, "inputs[0].shape"),
    "too few bytes": (with_shape(1, 3, raw=bytes(11)), Invalid, "inputs[0].shape"),
    "too many bytes": (with_shape(1, 3, raw=bytes(13)), Invalid, "inputs[0].shape"),
    "a truth of two": (with_shape(1, 3, datatype="BOOL", raw=b"\0\1\2"), Invalid, "inputs[0]"),
    "another width than the model's": (
        request_of("plain", {"x": IMAGES.astype(np.float64)}),
        Invalid,
        "",
    ),
    "a shape that the model does not take": (request_of("plain", {"x": noise(2, 4, 8, 8)}), Invalid, ""),
    "inputs over the limit": (request_of("plain", {"x": noise(2, 3, 300, 300)}), Exhausted, ""),
    "raw and typed": (
        changed(lambda r: r.inputs[0].contents.fp32_contents.extend([0, 0, 0])),
        Invalid,
        "inputs[0].contents",
    ),
    "raw and empty typed": (
        changed(lambda r: r.inputs[0].contents.SetInParent()),
        Invalid,
        "inputs[0].contents",
    ),
    "more raw than inputs": (
        changed(lambda r: r.raw_input_contents.append(b"")),
        Invalid,
        "raw_input_contents",
    ),
    "neither raw nor typed": (
        changed(lambda r: r.ClearField("raw_input_contents")),
        Invalid,
        "inputs[0].contents.fp32_contents",
    ),
    "typed elements missing": (
        typed("FP32", fp32_contents=[1, 2]),
        Invalid,
        "inputs[0].contents.fp32_contents",
    ),
    "typed elements of a huge shape": (
        typed("FP32", (2**62, 2**62), fp32_contents=[1]),
        Invalid,
        "inputs[0].contents.fp32_contents",
    ),
    "typed elements of another kind": (
        typed("FP32", int_contents=[1, 2, 3]),
        Invalid,
        "inputs[0].contents.int_contents",
    ),
    "typed elements of two kinds": (
        typed("FP32", fp32_contents=[1, 2, 3], fp64_contents=[1, 2, 3]),
        Invalid,
        "inputs[0].contents.fp64_contents",
    ),
    "a number that does not fit": (typed("INT8", int_contents=[1, 2, 128]), Invalid, "inputs[0].contents"),
    "a number far too large": (typed("UINT16", uint_contents=[1, 2, 2**31]), Invalid, "inputs[0].contents"),
    "typed half precision": (typed("FP16", fp32_contents=[1, 2, 3]), Invalid, "inputs[0].contents"),
    "images of two dimensions": (with_shape(1, 3, datatype="BYTES"), Invalid, "inputs[0].shape"),
    "images that end too soon": (
        with_shape(1, datatype="BYTES", raw=b"\xff\xff\xff\xff\0"),
        Invalid,
        "inputs[0]",
    ),
    "fewer images than said": (
        with_shape(2, datatype="BYTES", raw=b"\1\0\0\0\0"),
        Invalid,
        "inputs[0].shape",
    ),
    "an image without bytes": (with_shape(1, datatype="BYTES", raw=bytes(4)), Invalid, "inputs[0]"),
    "images for a model that takes none": (
        with_shape(1, datatype="BYTES", raw=b"\1\0\0\0\0"),
        "FAILED_PRECONDITION",
        "",
    ),
    "shared memory": (
        changed(lambda r: r.inputs[0].parameters["shared_memory_region"].MergeFromString(b"")),
        "UNIMPLEMENTED",
        "inputs[0].parameters",
    ),
    "a sequence": (
        good(parameters={"sequence_id": {"int64_param": 7}}),
        Invalid,
        "parameters['sequence_id']",
    ),
    "unknown numerics": (
        good(parameters={"numerics": {"string_param": "fp8"}}),
        Invalid,
        "parameters['numerics']",
    ),
    "an unknown module": (good(outputs=[{"name": "boht"}]), NotFound, ""),
    "no selector": (good(outputs=[{"name": "both["}]), Invalid, "outputs[0].name"),
    "an output twice": (good(outputs=[{"name": "/out"}] * 2), Invalid, "outputs[1].name"),
    "too many outputs": (good(outputs=[{"name": f"x{i}"} for i in range(9)]), Invalid, "outputs"),
    "classes": (
        good(outputs=[{"name": "/out", "parameters": {"classification": {"int64_param": 3}}}]),
        "UNIMPLEMENTED",
        "outputs[0].parameters",
    ),
    "a gradient": (request_of("plain", {"x": IMAGES}, ["conv/grad_out"]), Invalid, "objective"),
    "a reply over the limit": (
        request_of("plain", {"x": noise(2, 3, 128, 128)}, ["conv"]),
        Exhausted,
        "",
    ),
}


@pytest.mark.parametrize(("request_", "code", "field"), CASES.values(), ids=CASES)
def test_the_caller_is_told_what_is_wrong(
    small_server: RunningServer, request_: Any, code: str, field: str
) -> None:
    with raw_channel(small_server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        infer(channel, request_)
    assert caught.value.code().name == code, caught.value.details()
    info = info_of(caught.value)
    assert info.metadata["field"] == field if field else info.reason
    assert field in str(caught.value.details())


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("ModelMetadata", {"name": "plane"}, NotFound),
        ("ModelMetadata", {"name": ""}, Invalid),
        ("ModelConfig", {"name": "plain", "version": "7"}, NotFound),
        ("ModelConfig", {"name": "sleeping"}, "FAILED_PRECONDITION"),
        ("ModelReady", {}, Invalid),
        ("ModelStatistics", {"name": "plane"}, NotFound),
        ("RepositoryIndex", {"repository_name": "x"}, Invalid),
        ("RepositoryModelLoad", {"model_name": "plane"}, NotFound),
        ("RepositoryModelLoad", {"model_name": "/etc/passwd"}, NotFound),
        ("RepositoryModelLoad", {"model_name": "plain", "repository_name": "x"}, Invalid),
        (
            "RepositoryModelLoad",
            {"model_name": "plain", "parameters": {"config": {"string_param": "{}"}}},
            Invalid,
        ),
        (
            "RepositoryModelLoad",
            {"model_name": "plain", "parameters": {"file:1/model.pt": {"bytes_param": b"x"}}},
            Invalid,
        ),
        (
            "RepositoryModelLoad",
            {"model_name": "resnet18", "parameters": {"weights": {"string_param": "/etc/passwd"}}},
            "ALREADY_EXISTS",
        ),
        ("RepositoryModelUnload", {"model_name": "plane"}, NotFound),
    ],
)
def test_other_methods_refuse_what_is_not_there(
    small_server: RunningServer, name: str, fields: dict[str, Any], code: str
) -> None:
    with raw_channel(small_server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        ask(channel, name, fields)
    assert caught.value.code().name == code, caught.value.details()
    assert info_of(caught.value).reason


UNARY = [method.name for method in SERVICE.methods if not method.client_streaming]


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize(
    ("message", "code"),
    [(b"\xff" * 64, Invalid), (bytes(17 << 20), Exhausted)],
    ids=["no message", "17 MiB"],
)
def test_bytes_that_are_no_message_are_refused(
    small_server: RunningServer, name: str, message: bytes, code: str
) -> None:
    """17 MiB of zeros are too much for all methods but the one that carries tensors, and nothing for that."""
    with raw_channel(small_server.address, max_send_message_length=-1) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE.full_name}/{name}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=60)
    assert caught.value.code().name == (Invalid if name == "ModelInfer" else code)
    assert info_of(caught.value).reason in ("INVALID_ARGUMENT", "REQUEST_TOO_LARGE")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (b"\x3a\x00" * (1 << 20), Invalid),  # empty raw contents
        (b"\x2a\x00" * (1 << 20), Invalid),  # empty inputs
        (b"\x1a" + b"\x80\x80\xc0\x04" + bytes(9 << 20), Exhausted),  # an id of 9 MiB
    ],
    ids=["raw contents", "inputs", "id"],
)
def test_a_message_that_would_take_long_to_read_is_not_read(
    small_server: RunningServer, message: bytes, code: str
) -> None:
    with raw_channel(small_server.address, max_send_message_length=-1) as channel:
        call: Any = channel.unary_unary(f"/{SERVICE.full_name}/ModelInfer", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(message, timeout=60)
    assert caught.value.code().name == code, caught.value.details()
