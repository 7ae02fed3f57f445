"""`gradients`: what it asks for, and by which keys its gradients are found."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client.fake_server import Behaviour, FakeServer, Received, chunks, feature_map
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tap_pb2

IMAGES = np.zeros((1, 3, 2, 2), np.float32)
OF = trocar.logit(207)


def array_of(position: int) -> np.ndarray[Any, Any]:
    return np.array([position], np.float32)


def answers(received: Received, _: Any) -> Iterator[bytes]:
    """Answer every tap with an array of its position, named as the server names it."""
    maps, expansions = [], []
    for position, tap in enumerate(received.head.taps):
        port = "grad_out" if tap.is_gradient else "out"
        name = tap.alias or (f"{tap.selector}/{port}" if tap.is_gradient else tap.selector)
        maps.append(feature_map(name, array_of(position), port=port))
        expansions.append(pb.SelectorExpansion(selector=tap.selector, names=[name]))
    head = pb.ExtractResponse(feature_maps=maps, expansions=expansions, objective_value=1.5)
    yield head.SerializeToString()
    yield from chunks([array_of(position).tobytes() for position in range(len(maps))], 1 << 20)


@pytest.fixture
def answering(client: trocar.Client, server: FakeServer) -> trocar.Client:
    behaviour: Behaviour = answers
    server.behaviour = behaviour
    return client


def test_gradients_are_asked_for_first_and_marked(answering: trocar.Client, server: FakeServer) -> None:
    statistics_only = trocar.tap("layer4", stats="l2", values=False)
    answering.gradients("resnet18", IMAGES, of=OF, at=["layer1", statistics_only], taps=["avgpool"])
    head = server.received[0].head
    assert [(tap.selector, tap.is_gradient) for tap in head.taps] == [
        ("layer1", True),
        ("layer4", True),
        ("avgpool", False),
    ]
    assert list(head.taps[1].statistics) == list(statistics_only.to_wire().statistics)
    assert head.objective == OF.to_wire()


def test_the_gradient_of_the_input_is_the_usual_one(answering: trocar.Client, server: FakeServer) -> None:
    grads = answering.gradients("resnet18", IMAGES, of=OF)
    assert server.received[0].head.taps[0] == tap_pb2.Tap(selector="/in", is_gradient=True)
    assert grads["/in"].item() == 0
    assert grads.objective == 1.5


def test_a_gradient_is_found_by_its_name_and_by_what_was_asked_for(answering: trocar.Client) -> None:
    grads = answering.gradients("resnet18", IMAGES, of=OF, at=["layer3", "layer4"], taps="avgpool")
    assert list(grads) == ["layer3/grad_out", "layer4/grad_out", "avgpool"]
    assert grads["layer4"] is grads["layer4/grad_out"]
    assert [grads.info[name].is_gradient for name in grads] == [True, True, False]


def test_a_value_that_was_tapped_too_has_the_key_and_the_gradient_its_name(answering: trocar.Client) -> None:
    grads = answering.gradients("resnet18", IMAGES, of=OF, at="layer4", taps="layer4")
    assert grads["layer4/grad_out"].item() == 0
    assert grads["layer4"].item() == 1
    assert grads.expansions["layer4"] == ("layer4/grad_out", "layer4")


def test_two_aliases_of_one_selector_are_told_apart(answering: trocar.Client) -> None:
    grads = answering.gradients(
        "resnet18", IMAGES, of=OF, at=trocar.tap("fc", alias="g"), taps=trocar.tap("fc", alias="v")
    )
    assert (grads["g"].item(), grads["v"].item()) == (0, 1)
    with pytest.raises(KeyError, match="'fc' stands for 2 feature maps: g, v"):
        grads["fc"]


def test_edits_sources_and_out_reach_the_call(answering: trocar.Client, server: FakeServer) -> None:
    mine = np.empty(1, np.float32)
    grads = answering.gradients(
        "resnet18",
        IMAGES,
        of=OF,
        at="fc",
        edits=["ablate-3", trocar.edit("fc/grad_out", "clamp", low=0)],
        sources={"clean": IMAGES},
        out={"fc/grad_out": mine},
        options=trocar.options(chunk_bytes=4096),
    )
    head = server.received[0].head
    assert [edit.WhichOneof("operation") for edit in head.edits] == ["stored", "clamp"]
    assert (head.sources[0].name, head.max_chunk_bytes) == ("clean", 4096)
    assert grads["fc"] is mine


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"of": None}, TypeError, "of=None is not an objective"),
        ({"of": OF, "at": []}, ValueError, "`at` is empty"),
    ],
)
def test_a_call_that_asks_for_nothing_is_refused(
    client: trocar.Client, server: FakeServer, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        client.gradients("resnet18", IMAGES, **options)
    assert not server.received


@pytest.mark.parametrize(
    ("port", "expected"),
    [
        ("out", False),
        ("in", False),
        ("param(weight)", False),
        ("grad_out", True),
        ("grad_in", True),
        ("grad_in(query)", True),
        ("param_grad(weight)", True),
    ],
)
def test_the_port_tells_gradients_from_values(port: str, expected: bool) -> None:
    info = trocar.FeatureMapInfo("x", "x", "Linear", 0, port, "", (1,), "float32", True)
    assert info.is_gradient is expected


def test_a_tap_may_ask_for_a_gradient_itself() -> None:
    assert trocar.tap("layer4", gradient=True).to_wire() == tap_pb2.Tap(selector="layer4", is_gradient=True)
    assert trocar.tap("layer4").to_wire() == tap_pb2.Tap(selector="layer4")
