"""float32 that travels as 16 bits: what the model sees and what comes back, against torch's casts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.odd_models import Dtypes, Identity
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from tests.support.wire.wire import chunk, raw_channel, request, send, tensor
from trocar.errors import InvalidArgumentError, RequestTooLargeError
from trocar_api.v1 import tensor_pb2

IMAGES = noise(4, 3, 8, 8)
WIRES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
wires = pytest.mark.parametrize("wire", WIRES)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {
        "plain": custom(Plain, (3, 8, 8)),
        "identity": custom(Identity),
        "dtypes": custom(Dtypes, (6,)),
    }
    with running_server(models=models, device="cpu", limits={"max_request_bytes": 1 << 20}) as running:
        yield running


def rounded(values: Any, wire: str) -> torch.Tensor:
    return torch.as_tensor(values).to(WIRES[wire]).float()


def expected(values: Any, wire: str) -> np.ndarray:
    """Return what the model makes of rounded images, rounded once more."""
    with torch.inference_mode():
        return rounded(rebuilt(Plain)(rounded(values, wire)), wire).numpy()


@wires
def test_inputs_and_values_are_rounded_and_come_as_float32(client: trocar.Client, wire: Any) -> None:
    found = client.extract("plain", IMAGES, "/out", options=trocar.options(wire=wire))["/out"]
    assert found.dtype == np.float32
    assert np.array_equal(found, expected(IMAGES, wire))


@wires
def test_a_stream_does_the_same(client: trocar.Client, wire: Any) -> None:
    batches = [IMAGES + number for number in range(3)]
    with client.extract_stream("plain", batches, "/out", options=trocar.options(wire=wire)) as stream:
        for result in stream:
            found = result.unwrap()["/out"]
            assert found.dtype == np.float32
            assert np.array_equal(found, expected(batches[result.index], wire))


@wires
def test_gradients_do_the_same(client: trocar.Client, wire: Any) -> None:
    found = client.gradients(
        "plain", IMAGES, of=trocar.logit(1), at="/in", options=trocar.options(wire=wire)
    )["/in"]
    given = rounded(IMAGES, wire).requires_grad_()
    rebuilt(Plain)(given)[:, 1].sum().backward()
    assert given.grad is not None
    assert found.dtype == np.float32
    assert np.array_equal(found, rounded(given.grad, wire).numpy())


@wires
def test_values_land_in_the_callers_float32_array(client: trocar.Client, wire: Any) -> None:
    mine = np.zeros_like(IMAGES)
    maps = client.extract(
        "identity", IMAGES, "identity", out={"identity": mine}, options=trocar.options(wire=wire)
    )
    assert maps["identity"] is mine
    assert np.array_equal(mine, rounded(IMAGES, wire).numpy())


@wires
def test_statistics_are_taken_before_values_are_rounded(client: trocar.Client, wire: Any) -> None:
    maps = client.extract(
        "identity", IMAGES, trocar.tap("identity", stats="l2"), options=trocar.options(wire=wire)
    )
    exact = rounded(IMAGES, wire).double().norm().item()
    assert maps.stats["identity"].l2 == pytest.approx(exact, rel=1e-12)
    alone = client.extract(
        "identity",
        IMAGES,
        trocar.tap("identity", stats="l2", values=False),
        options=trocar.options(wire=wire),
    )
    assert alone.stats["identity"].l2 == maps.stats["identity"].l2


def test_a_cast_of_the_callers_own_goes_first(client: trocar.Client) -> None:
    maps = client.extract(
        "identity", IMAGES, trocar.tap("identity", cast="int8"), options=trocar.options(wire="float16")
    )
    assert maps["identity"].dtype == np.int8


@wires
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float16, np.float64])
def test_whole_numbers_and_other_floats_travel_as_they_are(
    client: trocar.Client, dtype: Any, wire: Any
) -> None:
    given = np.linspace(0.1, 5.1, 6).reshape(2, 3).astype(dtype)
    maps = client.extract("identity", given, "identity", options=trocar.options(wire=wire))
    assert maps["identity"].dtype == dtype
    assert np.array_equal(maps["identity"], given)
    assert maps.info["identity"].cast is None


@wires
def test_of_outputs_of_every_dtype_those_of_float32_are_rounded(client: trocar.Client, wire: Any) -> None:
    images = noise(6, 6)
    maps = client.extract("dtypes", images, "/out", options=trocar.options(wire=wire))
    for name, value in Dtypes()(rounded(images, wire)).items():
        sent = rounded(value, wire) if value.dtype is torch.float32 else value
        wanted = sent.float() if name == "bfloat16" else sent.resolve_conj().resolve_neg()
        found = maps[f'/out["{name}"]']
        assert found.dtype == wanted.numpy().dtype, name
        assert np.array_equal(found, wanted.numpy()), name


@wires
def test_reduced_values_are_rounded_and_their_positions_are_not(client: trocar.Client, wire: Any) -> None:
    tap = trocar.tap("identity", reduce=trocar.top_k(2, dim=1))
    maps = client.extract("identity", IMAGES, tap, options=trocar.options(wire=wire))
    top = rounded(IMAGES, wire).topk(2, 1)
    assert np.array_equal(maps["identity"], top.values.numpy())
    assert np.array_equal(maps["identity.indices"], top.indices.numpy())


def test_a_stream_has_whole_numbers_too(client: trocar.Client) -> None:
    whole = np.arange(6).reshape(2, 3)
    with client.extract_stream(
        "identity", [whole, whole + 1], "identity", options=trocar.options(wire="float16")
    ) as stream:
        found = [result.unwrap()["identity"] for result in stream]
    assert [values.dtype for values in found] == [np.int64] * 2
    assert np.array_equal(found[1], whole + 1)


def test_sources_and_starts_are_rounded_too(client: trocar.Client) -> None:
    value = client.extract("plain", IMAGES, "fc/in")["fc/in"]
    found = client.extract("plain", value, "/out", start_at="fc/in", options=trocar.options(wire="bfloat16"))[
        "/out"
    ]
    with torch.inference_mode():
        wanted = rounded(rebuilt(Plain).fc(rounded(value, "bfloat16")), "bfloat16")
    assert np.allclose(found, wanted.numpy(), rtol=2**-7)


def ask(server: RunningServer, given: Any, wanted: Any, shape: tuple[int, ...] = (1, 3)) -> list[bytes]:
    entry = tensor(shape, given)
    entry.convert_to = wanted
    with raw_channel(server.address) as channel:
        return send(channel, request(inputs=[entry], chunks=[chunk(bytes(6))]))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (tensor_pb2.DTYPE_INT16, tensor_pb2.DTYPE_FLOAT32),
        (tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_INT64),
        (tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_COMPLEX64),
    ],
)
def test_only_floats_are_converted_and_only_to_floats(server: RunningServer, given: Any, wanted: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ask(server, given, wanted)
    assert caught.value.details["field"] == "inputs[0].convert_to"


def test_an_unknown_form_is_refused(server: RunningServer) -> None:
    with pytest.raises(trocar.errors.InvalidTensorError):
        ask(server, tensor_pb2.DTYPE_FLOAT16, 99)


def test_what_grows_over_the_limit_is_refused(server: RunningServer) -> None:
    shape = (1, 300_000)  # 600 kB as they come, 2.4 MB as the model would get them; 1 MiB is allowed
    with pytest.raises(RequestTooLargeError):
        ask(server, tensor_pb2.DTYPE_FLOAT16, tensor_pb2.DTYPE_FLOAT64, shape)
