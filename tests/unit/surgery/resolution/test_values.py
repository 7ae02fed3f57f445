"""Nodes and functions: the same choices as for modules, in records of their own."""

from dataclasses import replace

import pytest
import torch

from tests.support.models.tiny_models import Plain
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, ModuleCall, ModuleRecord, parse_selector, resolve


def leaf(port: str = "out", *picks: int | str) -> Leaf:
    return Leaf(port, picks, "Tensor", (2, 3), torch.float32, is_overwritten=False)


def call(moment: int, inputs: list[Leaf] | None = None, outputs: list[Leaf] | None = None) -> ModuleCall:
    return ModuleCall(moment, moment + 1, inputs or [leaf("in", 0)], outputs or [leaf()])


SDPA = "scaled_dot_product_attention"
MASKED = [leaf("in", 0), leaf("in", 1), leaf("in", 2), leaf("in(attn_mask)")]
FUNCTIONS = {
    "relu": ModuleRecord("relu", "function", [call(1)]),
    "softmax": ModuleRecord("softmax", "function", [call(3), call(7), call(11)]),
    SDPA: ModuleRecord(SDPA, "function", [call(5, MASKED, [leaf(), leaf("scores")])]),
}
NODES = {
    "x": ModuleRecord("x", "node", [call(1)]),
    "layer1.0.add": ModuleRecord("layer1.0.add", "node", [call(3)]),
    "layer1.0.add_1": ModuleRecord("layer1.0.add_1", "node", [call(5)]),
    "chunk": ModuleRecord("chunk", "node", [call(7, outputs=[leaf("out", 0), leaf("out", 1)])]),
    "size": ModuleRecord("size", "node", [call(9, outputs=[Leaf("out", (), "Size")])]),
}
RECORDING = replace(
    recorded(Plain, (2, 3, 8, 8)), functions=FUNCTIONS, nodes=NODES, stages={"mid": "fx:chunk[0]"}
)


def names(selector: str) -> list[str]:
    (values,) = resolve([parse_selector(selector)], RECORDING)
    return [target.name for target, _ in values]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("fn:relu", ["fn:relu"]),
        ("fn:relu@0", ["fn:relu"]),
        ("fn:softmax@1", ["fn:softmax@1"]),
        ("fn:softmax@-1/in[0]", ["fn:softmax@2/in"]),
        ("fn:softmax@*", ["fn:softmax@0", "fn:softmax@1", "fn:softmax@2"]),
        ("fn:softmax#1:", ["fn:softmax@1", "fn:softmax@2"]),
        ("fn:*", ["fn:relu", "fn:softmax@0", f"fn:{SDPA}", "fn:softmax@1", "fn:softmax@2"]),
        ("fn:#2", [f"fn:{SDPA}"]),
        (f"fn:{SDPA}", [f"fn:{SDPA}"]),
        (f"fn:{SDPA}/scores", [f"fn:{SDPA}/scores"]),
        ("fn:*/scores", [f"fn:{SDPA}/scores"]),
        (f"fn:{SDPA}/in(attn_mask)", [f"fn:{SDPA}/in(attn_mask)"]),
        (f"fn:{SDPA}/in[1]", [f"fn:{SDPA}/in[1]"]),
        ("fx:layer1.0.add", ["fx:layer1.0.add"]),
        ("fx:layer1.*.add*", ["fx:layer1.0.add", "fx:layer1.0.add_1"]),
        ("fx:chunk", ["fx:chunk[0]", "fx:chunk[1]"]),
        ("fx:chunk[-1]", ["fx:chunk[1]"]),
        ("fx:#-1", ["fx:chunk[0]", "fx:chunk[1]"]),
        ("fx:**#1:3", ["fx:layer1.0.add", "fx:layer1.0.add_1"]),
        ("mid", ["fx:chunk[0]"]),
    ],
)
def test_a_selector_of_another_kind_stands_for_values_in_execution_order(
    selector: str, expected: list[str]
) -> None:
    assert names(selector) == expected


@pytest.mark.parametrize(
    ("selector", "reason", "words"),
    [
        ("fn:sofmax", ErrorReason.UNKNOWN_FUNCTION, "nearest: softmax"),
        ("fn:qqqq", ErrorReason.UNKNOWN_FUNCTION, "this pass calls relu, softmax"),
        ("fn:q*", ErrorReason.UNKNOWN_FUNCTION, "matches no function"),
        ("fn:softmax", ErrorReason.AMBIGUOUS_CALL, "'fn:softmax@0' to 'fn:softmax@2'"),
        ("fn:softmax@3", ErrorReason.CALL_OUT_OF_RANGE, "the last call is '@2'"),
        ("fn:softmax#3", ErrorReason.CALL_OUT_OF_RANGE, "the last one is '#2'"),
        ("fn:softmax#3:", ErrorReason.UNKNOWN_FUNCTION, "empty range"),
        ("fn:softmax@0/scores", ErrorReason.UNKNOWN_PICK, "available: fn:softmax"),
        ("fn:relu/in(mask)", ErrorReason.UNKNOWN_PICK, "available: fn:relu/in"),
        ("fx:layer1.0.ad", ErrorReason.UNKNOWN_NODE, "nearest: layer1.0.add"),
        ("fx:zzz", ErrorReason.UNKNOWN_NODE, "get_graph_node_names"),
        ("fx:chunk[2]", ErrorReason.UNKNOWN_PICK, "available: fx:chunk[0], fx:chunk[1]"),
        ("fx:size", ErrorReason.NOT_A_TENSOR, "Size"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is(selector: str, reason: ErrorReason, words: str) -> None:
    with pytest.raises(ServiceError) as caught:
        names(selector)
    assert caught.value.reason is reason
    assert words in caught.value.message


def test_a_target_says_of_which_kind_it_is() -> None:
    for selector, kind, path in (("fn:relu", "fn", "relu"), ("fx:x", "fx", "x"), ("conv", "module", "conv")):
        ((target, _),) = resolve([parse_selector(selector)], RECORDING)[0]
        assert (target.kind, target.path, target.call) == (kind, path, 0)


def test_every_name_of_a_reply_stands_for_that_value_alone() -> None:
    for selector in ("fn:*", "fn:*/in", "fx:**"):
        for target, own in resolve([parse_selector(selector)], RECORDING)[0]:
            assert resolve([parse_selector(target.name)], RECORDING) == [[(target, own)]]
