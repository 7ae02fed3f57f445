"""Heads of plain requests: equal requests share one, and no other request ever gets it."""

from typing import Any

import numpy as np
import pytest

import trocar
from trocar._wire.requests import PlainRequests, extract_call

OPTIONS = ("m", None, None, True, True, "normal", None)


def kept(inputs: Any, taps: Any) -> PlainRequests:
    requests = PlainRequests()
    key, request, _ = requests.find(inputs, taps, OPTIONS)
    assert request is None
    requests.keep(key, inputs, extract_call("m", inputs, taps))
    return requests


@pytest.mark.parametrize(
    "inputs",
    [
        np.arange(6, dtype=np.float32).reshape(1, 6),
        np.arange(6, dtype=np.int64),
        np.zeros((), np.float64),
        np.zeros((4, 5, 3), np.uint8),
    ],
    ids=["floats", "integers", "scalar", "pixels"],
)
@pytest.mark.parametrize(
    "taps",
    [
        "layer4",
        ["layer4", "fc/in"],
        trocar.tap("layer4", stats=["mean", "quantiles"], values=False, over="channel", channel_dim=1),
        ["layer4", trocar.tap("fc", alias="head", cast="float16")],
    ],
    ids=["text", "list", "tap", "taps"],
)
def test_an_equal_request_is_the_one_that_would_be_built(inputs: Any, taps: Any) -> None:
    other = np.ones_like(inputs)
    _, request, _ = kept(inputs, taps).find(other, taps, OPTIONS)
    assert request is not None
    assert request.message() == extract_call("m", other, taps).message()


@pytest.mark.parametrize(
    ("inputs", "taps", "options"),
    [
        (np.zeros((2, 3), np.float32), "layer4", OPTIONS),
        (np.zeros((1, 3), np.float64), "layer4", OPTIONS),
        (np.zeros((1, 3), np.float32), "layer3", OPTIONS),
        (np.zeros((1, 3), np.float32), trocar.tap("layer4"), OPTIONS),
        (np.zeros((1, 3), np.float32), "layer4", ("n", *OPTIONS[1:])),
    ],
    ids=["shape", "dtype", "selector", "tap", "model"],
)
def test_another_request_is_built_anew(inputs: Any, taps: Any, options: Any) -> None:
    requests = kept(np.zeros((1, 3), np.float32), "layer4")
    assert requests.find(inputs, taps, options)[1] is None


@pytest.mark.parametrize(
    ("inputs", "taps"),
    [
        (np.zeros((4, 6), np.float32)[:, ::2], "layer4"),
        (np.zeros(3, ">f4"), "layer4"),
        (np.ma.masked_array(np.zeros(3, np.float32)), "layer4"),
        ([np.zeros(3, np.float32)], "layer4"),
        (np.zeros(3, np.float32), trocar.tap("layer4", stats=trocar.quantiles(0.0, 0.5))),
        (np.zeros(3, np.float32), ["layer4", trocar.tap("fc", stats=trocar.histogram(edges=[0.0, 1.0]))]),
        (np.zeros(3, np.float32), trocar.tap("layer4", channels=[0, 1])),
        (np.zeros(3, np.float32), []),
        (np.zeros(3, np.float32), [["layer4"]]),
    ],
    ids=[
        *("strided", "big endian", "masked", "list"),
        *("quantiles", "histogram", "reduction", "none", "nested"),
    ],
)
def test_what_is_not_plain_has_no_key(inputs: Any, taps: Any) -> None:
    assert PlainRequests().find(inputs, taps, OPTIONS) == (None, None, None)


def test_options_that_cannot_be_hashed_have_no_key() -> None:
    assert PlainRequests().find(np.zeros(3, np.float32), "layer4", ([],)) == (None, None, None)


def test_a_payload_that_is_a_copy_is_not_kept() -> None:
    batch = np.zeros((1, 4, 5, 3), np.uint8)
    requests = PlainRequests()
    key, _, _ = requests.find(batch, "layer4", OPTIONS)
    requests.keep(key, batch.copy(), extract_call("m", batch, "layer4"))
    assert requests.find(batch, "layer4", OPTIONS)[1] is None


def test_heads_are_bounded() -> None:
    requests, inputs = PlainRequests(), np.zeros(3, np.float32)
    call = extract_call("m", inputs, "layer4")
    for number in range(1000):
        key, _, _ = requests.find(inputs, f"layer{number}", OPTIONS)
        requests.keep(key, inputs, call)
    assert len(requests._kept) <= 256
