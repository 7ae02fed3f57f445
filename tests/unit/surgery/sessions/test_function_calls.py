"""The functions that a model calls, as a mode sees them: names, counts, what is inside what."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from trocar_server.surgery.sessions.function_calls import FunctionWatch

ROWS = torch.arange(6.0).reshape(2, 3) + 1


class Log:
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def enter(self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.lines.append(f"{name}@{index}")
        torch.zeros(1).add(1)  # what a listener does itself is not noticed

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self.lines.append(f"/{name}@{index}")

    def fail(self, name: str, index: int) -> None:
        self.lines.append(f"!{name}@{index}")

    @property
    def started(self) -> list[str]:
        return [line for line in self.lines if line[0] not in "/!"]


def calls(run: Callable[[], object]) -> list[str]:
    log = Log()
    with FunctionWatch(log):
        run()
    return log.started


def add_in_place() -> None:
    x = ROWS.clone()
    x += 1


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("add", lambda: ROWS + 1),
        ("add", lambda: 1 + ROWS),
        ("add", lambda: torch.add(ROWS, 1)),
        ("add", lambda: ROWS.add(1)),
        ("add", lambda: torch.ops.aten.add(ROWS, ROWS)),
        ("add", lambda: torch.ops.aten.add.Tensor(ROWS, ROWS)),
        ("sub", lambda: 1 - ROWS),
        ("div", lambda: ROWS / 2),
        ("div", lambda: 1 / ROWS),
        ("floor_divide", lambda: ROWS // 2),
        ("remainder", lambda: ROWS % 2),
        ("pow", lambda: ROWS**2),
        ("pow", lambda: 2**ROWS),
        ("matmul", lambda: ROWS @ ROWS[0]),
        ("eq", lambda: ROWS == 1),
        ("bitwise_and", lambda: ROWS.bool() & ROWS.bool()),
        ("bitwise_not", lambda: ~ROWS.bool()),
        ("getitem", lambda: ROWS[0]),
        ("relu", lambda: F.relu(ROWS)),
        ("softmax", lambda: F.softmax(ROWS, -1)),
        ("linear", lambda: F.linear(ROWS, ROWS)),
        ("max_pool2d", lambda: F.max_pool2d(ROWS[None], 1)),
    ],
)
def test_a_function_has_one_name_however_it_is_written(name: str, run: Callable[[], object]) -> None:
    assert calls(run)[-1] == f"{name}@0"


def test_an_operator_in_place_is_the_method_in_place() -> None:
    assert calls(add_in_place) == ["clone@0", "add_@0"]


def test_attributes_are_no_calls() -> None:
    assert calls(lambda: (ROWS.shape, ROWS.dtype, ROWS.device, ROWS.T, ROWS.data)) == []


def test_calls_are_counted_by_name_from_zero() -> None:
    assert calls(lambda: (ROWS + 1).mul(2) + 1) == ["add@0", "mul@0", "add@1"]


def test_what_a_function_does_inside_is_not_noticed() -> None:
    """`interpolate` and `local_response_norm` are Python around other functions."""
    images = torch.rand(1, 4, 4, 4)
    assert calls(lambda: F.interpolate(images, size=2)) == ["interpolate@0"]
    assert calls(lambda: F.local_response_norm(images, 2)) == ["local_response_norm@0"]


def test_multihead_attention_is_opened() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    rows = torch.rand(1, 3, 4)
    log = Log()
    with torch.inference_mode(), FunctionWatch(log):
        module(rows, rows, rows, need_weights=False)
    inside = log.lines[
        log.lines.index("multi_head_attention_forward@0") : log.lines.index("/multi_head_attention_forward@0")
    ]
    assert [name for name in inside if name.startswith(("linear", "scaled"))] == [
        "linear@0",
        "scaled_dot_product_attention@0",
        "linear@1",
    ]


@pytest.mark.parametrize("need_weights", [True, False])
def test_an_opened_function_computes_what_it_computes_closed(need_weights: bool) -> None:
    torch.manual_seed(7)
    module = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True).eval()
    rows = torch.rand(2, 3, 8).requires_grad_()  # a gradient keeps torch from its fused kernel
    mask = torch.tensor([[False, False, True], [False, False, False]])
    plain = module(rows, rows, rows, need_weights=need_weights, key_padding_mask=mask)
    with FunctionWatch(Log()):
        opened = module(rows, rows, rows, need_weights=need_weights, key_padding_mask=mask)
    assert torch.equal(plain[0], opened[0])
    assert not need_weights or torch.equal(plain[1], opened[1])


def test_the_fused_kernel_of_an_encoder_layer_hides_nothing() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    with torch.inference_mode():
        names = calls(lambda: layer(torch.rand(1, 3, 8)))
    assert "scaled_dot_product_attention@0" in names
    assert not [name for name in names if name.startswith("_transformer_encoder_layer_fwd")]


def test_a_call_that_raises_and_is_caught_counts_and_is_closed() -> None:
    log = Log()
    with FunctionWatch(log):
        try:
            torch.cat([ROWS, ROWS[0]])
        except RuntimeError:
            torch.cat([ROWS, ROWS])
    assert log.lines == ["getitem@0", "/getitem@0", "cat@0", "!cat@0", "cat@1", "/cat@1"]


def test_an_opened_function_that_raises_leaves_the_count_and_the_modes_right() -> None:
    module = nn.MultiheadAttention(4, 2, batch_first=True).eval()
    rows = torch.rand(1, 3, 4)
    log = Log()
    with FunctionWatch(log) as watch:
        with pytest.raises(AssertionError):
            module(rows, rows[:, :2], rows, need_weights=False)
        assert _get_current_function_mode_stack() == [watch]
        rows.add(1)
    assert "!multi_head_attention_forward@0" in log.lines
    assert log.lines[-2:] == ["add@0", "/add@0"]


def test_a_model_that_calls_itself_is_counted_as_it_starts() -> None:
    def halve(x: torch.Tensor) -> torch.Tensor:
        return x if len(x) < 2 else torch.cat([halve(half) for half in x.split(len(x) // 2)])

    names = [name for name in calls(lambda: halve(torch.rand(4))) if name.startswith(("split", "cat"))]
    assert names == ["split@0", "split@1", "cat@0", "split@2", "cat@1", "cat@2"]


def test_a_paused_watch_notices_nothing() -> None:
    log = Log()
    with FunctionWatch(log, lambda: True):
        ROWS.add(1)
    assert log.lines == []


def test_factories_are_calls_too() -> None:
    assert calls(lambda: torch.zeros(2).add(1)) == ["zeros@0", "add@0"]


def test_a_mode_around_it_still_works() -> None:
    log = Log()
    with torch.device("meta"), FunctionWatch(log):
        assert torch.zeros(2).is_meta
    assert log.started == ["zeros@0"]
