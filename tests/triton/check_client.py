"""What tritonclient gets from our server. Knows nothing of Trocar but its address."""

import asyncio
import os
import re
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

ADDRESS, GUARDED, TOKEN = (os.environ[name] for name in ("OPEN_SERVER", "GUARDED_SERVER", "TOKEN"))
EXPECTED = np.load(Path(os.environ["FOLDER"]) / "expected.npz")
BATCH = EXPECTED["batch"]
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "open-inference.md"
DESCRIPTORS = ROOT / "service/trocar_server/rpc/oip/open_inference.binpb"
TIMEOUT_S = 60


@pytest.fixture
def client() -> Any:
    with triton.InferenceServerClient(ADDRESS) as connected:
        yield connected


def tensor(array: Any, name: str = "x", module: Any = triton) -> Any:
    entry = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    entry.set_data_from_numpy(array)
    return entry


def outputs(*names: str) -> list[Any]:
    return [triton.InferRequestedOutput(name) for name in names]


def status_of(call: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return str(caught.value.status()).removeprefix("StatusCode.")


# --- Inference ---


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_taps_have_the_bits_of_torch_and_of_trocars_own_client(client: Any, compression: str | None) -> None:
    names = ["layer1", "layer4", "avgpool", "layer4:mean", "layer4:std", "layer4:zero_fraction"]
    names += ["layer4:mean:channel"]
    result = client.infer(
        "resnet18",
        [tensor(BATCH)],
        outputs=outputs(*names),
        request_id="7",
        compression_algorithm=compression,
        client_timeout=TIMEOUT_S,
    )
    assert result.get_response().id == "7"
    for name in names:
        for source in ("torch", "trocar"):
            if f"{source} {name}" in EXPECTED:
                wanted, found = EXPECTED[f"{source} {name}"], result.as_numpy(name)
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert found.tobytes() == wanted.tobytes(), (source, name)


def test_texts_as_bytes_are_tokenized(client: Any) -> None:
    texts = np.array([text.encode() for text in EXPECTED["texts"]], dtype=object)
    result = client.infer("bert", [tensor(texts, "text")], outputs=outputs("encoder.layer.0"))
    assert result.as_numpy("encoder.layer.0").tobytes() == EXPECTED["transformers layer"].tobytes()


def test_several_named_inputs(client: Any) -> None:
    names = ("attention_mask", "input_ids", "token_type_ids")
    inputs = [tensor(EXPECTED[f"bert {name}"], name) for name in names]
    result = client.infer("bert", inputs, outputs=outputs("encoder.layer.0"))
    assert result.as_numpy("encoder.layer.0").tobytes() == EXPECTED["transformers layer"].tobytes()


def test_without_outputs_the_models_own_come(client: Any) -> None:
    result = client.infer("resnet18", [tensor(BATCH)])
    (name,) = [entry.name for entry in client.get_model_metadata("resnet18").outputs]
    assert result.as_numpy(name).tobytes() == EXPECTED["torch /out"].tobytes()


@pytest.mark.parametrize(
    "kind",
    [
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", ml_dtypes.bfloat16),
    ],
)
def test_every_datatype_goes_there_and_back(client: Any, kind: Any) -> None:
    array = ROWS.astype(kind)
    found = client.infer("identity", [tensor(array)]).as_numpy("/out")
    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


def test_a_batch_of_32_photographs_goes_in_one_message(client: Any) -> None:
    array = np.ones((32, 3, 224, 224), np.float32)
    result = client.infer("identity", [tensor(array)], outputs=outputs("/out:count"))
    assert result.as_numpy("/out:count") == [array.size]


def test_a_picture_is_prepared_by_the_server(client: Any) -> None:
    pictures = np.array([EXPECTED["picture"].tobytes()], dtype=np.object_)
    found = client.infer("pictures", [tensor(pictures)], outputs=outputs("conv")).as_numpy("conv")
    assert found.tobytes() == EXPECTED["trocar picture"].tobytes()


def test_parameters_are_taken(client: Any) -> None:
    result = client.infer(
        "plain",
        [tensor(np.ones((1, 3, 8, 8), np.float32))],
        priority=1,
        timeout=60_000_000,
        parameters={"numerics": "exact", "note": "ignored"},
    )
    assert result.get_response().parameters["numerics"].string_param == "exact"


def test_a_call_in_the_background_is_answered(client: Any) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    client.async_infer("identity", [tensor(ROWS)], lambda result, error: answers.put((result, error)))
    result, error = answers.get(timeout=TIMEOUT_S)
    assert error is None
    assert np.array_equal(result.as_numpy("/out"), ROWS)


def test_a_stream_keeps_the_order_and_survives_a_failure(client: Any) -> None:
    answers: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(8):
        name = "identity" if number != 3 else "nobody"
        client.async_stream_infer(name, [tensor(ROWS + number)], request_id=str(number))
    found = [answers.get(timeout=TIMEOUT_S) for _ in range(8)]
    client.stop_stream()
    assert "no model 'nobody'" in str(found.pop(3)[1])
    numbers = [0, 1, 2, 4, 5, 6, 7]
    assert [result.get_response().id for result, _ in found] == list(map(str, numbers))
    for (result, error), number in zip(found, numbers, strict=True):
        assert error is None
        assert np.array_equal(result.as_numpy("/out"), ROWS + number)


def test_the_asyncio_client_works() -> None:
    async def run() -> None:
        async with triton_aio.InferenceServerClient(ADDRESS) as client:
            assert await client.is_server_ready()
            result = await client.infer("identity", [tensor(ROWS, module=triton_aio)])
            assert np.array_equal(result.as_numpy("/out"), ROWS)

            async def requests() -> Any:
                for number in range(3):
                    yield {"model_name": "identity", "inputs": [tensor(ROWS + number, module=triton_aio)]}

            found = [answer async for answer in client.stream_infer(requests())]
            for number, (result, error) in enumerate(found):
                assert error is None
                assert np.array_equal(result.as_numpy("/out"), ROWS + number)
            assert len(found) == 3

    asyncio.run(run())


# --- What is not right ---


@pytest.mark.parametrize(
    ("status", "name", "arguments"),
    [
        ("NOT_FOUND", "infer", {"model_name": "plane", "inputs": [tensor(ROWS)]}),
        ("NOT_FOUND", "infer", {"model_name": "plain", "inputs": [tensor(ROWS)], "model_version": "2"}),
        (
            "NOT_FOUND",
            "infer",
            {"model_name": "identity", "inputs": [tensor(ROWS)], "outputs": outputs("fc")},
        ),
        ("INVALID_ARGUMENT", "infer", {"model_name": "plain", "inputs": [tensor(ROWS)]}),
        ("INVALID_ARGUMENT", "infer", {"model_name": "identity", "inputs": [tensor(ROWS, "y")]}),
        ("INVALID_ARGUMENT", "infer", {"model_name": "identity", "inputs": [tensor(ROWS)], "sequence_id": 3}),
        ("DEADLINE_EXCEEDED", "infer", {"model_name": "plain", "inputs": [tensor(BATCH)], "timeout": 1}),
        ("NOT_FOUND", "get_model_metadata", {"model_name": "plane"}),
        ("NOT_FOUND", "get_model_config", {"model_name": "plane"}),
        ("NOT_FOUND", "get_inference_statistics", {"model_name": "plane"}),
        ("NOT_FOUND", "load_model", {"model_name": "plane"}),
        ("INVALID_ARGUMENT", "load_model", {"model_name": "plain", "config": "{}"}),
        ("UNIMPLEMENTED", "get_system_shared_memory_status", {}),
        ("UNIMPLEMENTED", "register_system_shared_memory", {"name": "a", "key": "/b", "byte_size": 9}),
        ("UNIMPLEMENTED", "unregister_system_shared_memory", {}),
        ("UNIMPLEMENTED", "get_cuda_shared_memory_status", {}),
        ("UNIMPLEMENTED", "unregister_cuda_shared_memory", {}),
        ("UNIMPLEMENTED", "get_trace_settings", {}),
        ("UNIMPLEMENTED", "update_log_settings", {"settings": {"log_info": True}}),
    ],
)
def test_a_wrong_call_has_its_status(client: Any, status: str, name: str, arguments: dict[str, Any]) -> None:
    assert status_of(partial(getattr(client, name), **arguments)) == status


def test_bytes_that_do_not_fit_the_shape_are_refused(client: Any) -> None:
    entry = tensor(ROWS)
    entry.set_shape([2, 4])
    assert status_of(lambda: client.infer("identity", [entry])) == "INVALID_ARGUMENT"
    shared = triton.InferInput("x", [2, 3], "FP32")
    shared.set_shared_memory("region", 24)
    assert status_of(lambda: client.infer("identity", [shared])) == "UNIMPLEMENTED"
    classes = [triton.InferRequestedOutput("/out", class_count=2)]
    assert status_of(lambda: client.infer("identity", [tensor(ROWS)], outputs=classes)) == "UNIMPLEMENTED"


def test_deflate_is_not_offered() -> None:
    with triton.InferenceServerClient(ADDRESS) as client:
        image = tensor(np.ones((1, 3, 8, 8), np.float32))
        ask = partial(client.infer, "plain", [image], compression_algorithm="deflate")
        assert status_of(ask) == "UNIMPLEMENTED"


def test_a_token_opens_the_methods_of_its_scope() -> None:
    with triton.InferenceServerClient(GUARDED) as client:
        headers = {"authorization": f"Bearer {TOKEN}"}
        image = tensor(np.ones((1, 3, 8, 8), np.float32))
        assert client.is_server_live(headers=headers)
        assert client.infer("plain", [image], headers=headers).as_numpy("/out").shape == (1, 5)
        assert status_of(lambda: client.infer("plain", [image])) == "UNAUTHENTICATED"
        assert status_of(client.is_server_live) == "UNAUTHENTICATED"
        assert status_of(lambda: client.unload_model("plain", headers=headers)) == "PERMISSION_DENIED"


# --- Server and models ---


def test_server_and_models_are_ready(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("plain")
    assert client.is_model_ready("plain", "1")
    assert not client.is_model_ready("plane")
    assert client.get_server_metadata(as_json=True)["name"] == "trocar"


def test_metadata_and_config_say_what_a_request_needs(client: Any) -> None:
    found = client.get_model_metadata("plain", as_json=True)
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": ["-1", "3", "8", "8"]}]
    assert found["outputs"] == [{"name": "/out", "datatype": "FP32", "shape": ["-1", "5"]}]
    config = client.get_model_config("plain").config
    assert (config.name, config.backend, config.max_batch_size) == ("plain", "pytorch", 4096)
    assert config.input[0].data_type == model_config_pb2.TYPE_FP32
    assert list(config.input[0].dims) == [3, 8, 8]


def test_models_come_and_go(client: Any) -> None:
    client.unload_model("half")
    assert not client.is_model_ready("half")
    states = {model.name: model.state for model in client.get_model_repository_index().models}
    assert (states["half"], states["plain"]) == ("UNAVAILABLE", "READY")
    client.load_model("half")
    assert client.is_model_ready("half")


def test_statistics_count(client: Any) -> None:
    def counts() -> tuple[int, int, int]:
        (found,) = client.get_inference_statistics("structured").model_stats
        return found.inference_count, found.execution_count, found.inference_stats.success.count

    before = counts()
    client.infer("structured", [tensor(ROWS)])
    assert counts() == (before[0] + 2, before[1] + 1, before[2] + 1)
    (found,) = client.get_inference_statistics("structured", as_json=True)["model_stats"]
    assert int(found["inference_stats"]["compute_infer"]["ns"]) > 0


# --- The guide ---


def test_the_code_of_the_guide_runs_and_prints_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```py\n(.*?)```\n```text\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    namespace: dict[str, Any] = {}
    for code, shown in blocks:
        exec(code.replace("localhost:50051", ADDRESS), namespace)
        assert capsys.readouterr().out == shown


# --- The descriptors ---


def test_our_messages_are_tritons() -> None:
    """Every message, field and method of ours is there with the same number, type and label; none of Triton's
    messages for the service is missing."""
    (ours,) = FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file
    theirs = FileDescriptorProto.FromString(service_pb2.DESCRIPTOR.serialized_pb)
    config = FileDescriptorProto.FromString(model_config_pb2.DESCRIPTOR.serialized_pb)
    fields = _fields([*theirs.message_type, *config.message_type])
    assert _fields(ours.message_type).items() <= fields.items()
    assert {message.name for message in theirs.message_type} <= {
        message.name for message in ours.message_type
    }
    assert _fields(theirs.message_type).items() <= _fields(ours.message_type).items()
    methods = {(m.name, m.input_type, m.output_type, m.client_streaming) for m in theirs.service[0].method}
    assert {
        (m.name, m.input_type, m.output_type, m.client_streaming) for m in ours.service[0].method
    } == methods
    numbers = {value.name: value.number for enum in config.enum_type for value in enum.value}
    assert {value.name: value.number for value in ours.enum_type[0].value}.items() <= numbers.items()


def _fields(messages: Any, above: str = "") -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {}
    for message in messages:
        path = f"{above}.{message.name}"
        found |= {f"{path}.{f.name}": (f.number, f.type, f.label, f.type_name) for f in message.field}
        found |= _fields(message.nested_type, path)
    return found
