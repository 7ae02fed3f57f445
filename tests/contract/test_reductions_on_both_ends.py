"""What the client says of a reduction is what the server does: words, payloads and numbers."""

from typing import Any

import numpy as np
import pytest
import torch

import trocar
from trocar._base.tensors import dequantize
from trocar_server.rpc.codec.reductions import cast_from_wire, operand_byte_counts, reductions_from_wire
from trocar_server.tensors.reductions import Reduced, cast_value, operand_specs, reduce_value

IMAGE = np.random.default_rng(0).normal(size=(3, 6, 5, 4)).astype(np.float32)
TOKENS = np.random.default_rng(1).normal(size=(3, 7, 6)).astype(np.float32)


def served(value: Any, tap: trocar.Tap) -> Reduced:
    """Do on a value what the server does for a tap as it comes over the wire."""
    wire = type(tap.to_wire()).FromString(tap.to_wire().SerializeToString())
    reductions = reductions_from_wire("reductions", wire.reductions)
    payloads = [bytearray(payload) for payload in tap.payloads()]
    assert [len(payload) for payload in payloads] == operand_byte_counts(reductions)
    operands = [
        torch.frombuffer(payload, dtype=spec.dtype).reshape(spec.shape)
        for payload, spec in zip(payloads, operand_specs(reductions), strict=True)
    ]
    channel_dim = wire.channel_dim if wire.HasField("channel_dim") else None
    return reduce_value(torch.from_numpy(value), reductions, channel_dim, operands)


@pytest.mark.parametrize(
    ("value", "tap", "expected"),
    [
        (IMAGE, trocar.tap("x", index=np.s_[1:, :, ..., -1]), IMAGE[1:, :, ..., -1]),
        (IMAGE, trocar.tap("x", samples=[2, 0], channels=slice(-2, None)), IMAGE[[2, 0]][:, -2:]),
        (TOKENS, trocar.tap("x", tokens=0, channels=[1]), TOKENS[:, :1, 1:2]),
        (IMAGE, trocar.tap("x", reduce=trocar.crop(1, 0, 3, 2)), IMAGE[..., 1:4, :2]),
        (IMAGE, trocar.tap("x", reduce=trocar.pool("max")), IMAGE.max((2, 3))),
        (IMAGE, trocar.tap("x", reduce=trocar.pool("avg"), channel_dim=-1), IMAGE.mean((1, 2))),
        (IMAGE, trocar.tap("x", reduce=trocar.peak()), IMAGE.max((2, 3))),
        (IMAGE, trocar.tap("x", reduce=trocar.peak(), channel_dim=-1), IMAGE.max((1, 2))),
        (TOKENS, trocar.tap("x", reduce=trocar.pool("avg")), TOKENS.mean(1)),
        (TOKENS, trocar.tap("x", reduce=trocar.pool("cls")), TOKENS[:, 0]),
        (
            IMAGE,
            trocar.tap("x", reduce=trocar.pool("gem", power=2)),
            np.sqrt((np.maximum(IMAGE, 1e-6) ** 2).mean((2, 3))),
        ),
        (
            IMAGE,
            trocar.tap("x", reduce=trocar.gram()),
            np.einsum("bihw,bjhw->bij", IMAGE, IMAGE) / 20,
        ),
        (
            IMAGE,
            trocar.tap("x", reduce=[trocar.pca(np.eye(6)[:2], np.ones(6)), trocar.pool("avg")]),
            (IMAGE[:, :2] - 1).mean((2, 3)),
        ),
        (
            IMAGE,
            trocar.tap("x", reduce=[trocar.pool("avg"), trocar.top_k(2, smallest=True)]),
            np.sort(IMAGE.mean((2, 3)))[:, :2],
        ),
    ],
)
def test_the_server_does_what_the_client_says(value: Any, tap: trocar.Tap, expected: Any) -> None:
    np.testing.assert_allclose(served(value, tap).value.numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "int8", "int8_per_channel"])
def test_the_error_bound_holds_for_what_the_client_has(name: Any) -> None:
    message = trocar.tap("x", cast=name).to_wire().cast
    found = cast_value(torch.from_numpy(IMAGE), cast_from_wire("cast", message), 1)
    sent = found.value
    received = (
        dequantize(sent.numpy(), found.scales, found.channel_dim) if found.scales else sent.float().numpy()
    )
    assert np.abs(received.astype(np.float64) - IMAGE).max() == found.max_error
    assert 0 < found.max_error < 0.02
