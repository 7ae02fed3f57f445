"""Which argument of a forward each input of a request becomes."""

from typing import Any

import pytest
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.oip.argument_names import arranged, input_names


class Plain(nn.Module):
    def forward(self, x: Any, y: Any = None, *, scale: Any = None) -> Any:
        return x


class Starred(nn.Module):
    def forward(self, first: Any, *more: Any, **named: Any) -> Any:
        return first


class PositionalOnly(nn.Module):
    def forward(self, x: Any, y: Any = None, z: Any = None, /) -> Any:
        return x


@pytest.mark.parametrize(
    ("module", "names", "expected"),
    [
        (Plain(), ["x"], [(0, "x")]),
        (Plain(), ["y", "x"], [(1, "x"), (0, "y")]),
        (Plain(), ["scale", "x"], [(1, "x"), (0, "scale")]),
        (Plain(), ["y"], [(0, "y")]),
        (nn.Sequential(), ["input"], [(0, "input")]),
        (Starred(), ["more__1", "first", "more__0"], [(1, "first"), (2, ""), (0, "")]),
        (Starred(), ["first", "anything"], [(0, "first"), (1, "anything")]),
        (PositionalOnly(), ["y", "x"], [(1, "x"), (0, "y")]),
    ],
)
def test_inputs_become_arguments(
    module: nn.Module, names: list[str], expected: list[tuple[int, str]]
) -> None:
    assert arranged("m", module, names) == expected


@pytest.mark.parametrize(
    ("module", "names", "field", "text"),
    [
        (Plain(), ["x", "z"], "inputs[1].name", "has no input 'z'; it takes x, y, scale"),
        (Plain(), ["x", "x"], "inputs[1].name", "twice"),
        (Plain(), [""], "inputs[0].name", "has no input ''"),
        (Plain(), ["x" * 2000], "inputs[0].name", "1024 characters"),
        (Plain(), ["self"], "inputs[0].name", "has no input 'self'"),
        (Starred(), ["first", "more__1", ""], "inputs[2].name", "has no input ''"),
    ],
)
def test_other_names_are_refused(module: nn.Module, names: list[str], field: str, text: str) -> None:
    with pytest.raises(ServiceError, match=text) as caught:
        arranged("m", module, names)
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("module", "count", "expected"),
    [(Plain(), 1, ["x"]), (Plain(), 2, ["x", "y"]), (Starred(), 3, ["first", "more__0", "more__1"])],
)
def test_the_first_arguments_are_named(module: nn.Module, count: int, expected: list[str]) -> None:
    assert input_names(module, count) == expected
