"""Names of arguments: bound by the parameters of a forward, and passed as it takes them."""

# pyright: reportArgumentType=false, reportCallIssue=false

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.forward_signature import signature_of


class Plain(nn.Module):
    def forward(self, x: Any, mask: Any = None, *, scale: Any = None) -> Any:
        return x, mask, scale


class Starred(nn.Module):
    def forward(self, first: Any, *more: Any, **named: Any) -> Any:
        return first, more, named


class PositionalOnly(nn.Module):
    def forward(self, x: Any, mask: Any = None, /, scale: Any = None) -> Any:
        return x, mask, scale


class Anything(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


def passed_on(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    return wrapper


def renamed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(self: nn.Module, image: Any) -> Any:
        return function(self, x=image)

    return wrapper


class Decorated(nn.Module):
    forward = passed_on(Plain.forward)


class Renamed(nn.Module):
    forward = renamed(Plain.forward)


def hooked(with_kwargs: bool) -> nn.Module:
    module = Plain()
    if with_kwargs:
        module.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs), with_kwargs=True)
    else:
        module.register_forward_pre_hook(lambda _, args: (args[0] + 1, *args[1:]))
    return module


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - y


PAIR = (torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("module", "names", "expected"),
    [
        (Plain(), ["", ""], ("x", "mask")),
        (Plain(), ["", "scale"], ("x", "scale")),
        (Plain(), ["mask", "x"], ("mask", "x")),
        (Plain(), ['["image"]', '["size"]', ""], ('x["image"]', 'x["size"]', "mask")),
        (Starred(), ["", "", ""], ("first", "", "")),
        (Starred(), ["", "other"], ("first", "other")),
        (PositionalOnly(), ["", "", ""], ("x", "mask", "scale")),
        (PositionalOnly(), ["mask", "x"], ("mask", "x")),
        (Anything(), ["", "", "x"], ("", "", "x")),
        (Decorated(), ["", ""], ("x", "mask")),
        (Renamed(), [""], ("image",)),
        (hooked(with_kwargs=False), ["", ""], ("x", "mask")),
        (torch.compile(Plain()), ["", ""], ("x", "mask")),
        (nn.Linear(2, 2), [""], ("input",)),
    ],
)
def test_each_argument_has_the_name_of_its_parameter(
    module: nn.Module, names: list[str], expected: tuple[str, ...]
) -> None:
    assert signature_of(module).bind(names) == expected


@pytest.mark.parametrize(
    ("module", "names", "text"),
    [
        (Plain(), ["", "", ""], "takes 2 arguments by position, and 3 are given; it takes x, mask, scale"),
        (Plain(), ["", "masks"], "no argument 'masks'; it takes x, mask, scale"),
        (Plain(), ["", "x"], "'x' is given by position and by name"),
        (Plain(), ["x", '["image"]'], "'x' is given, and inputs within it too"),
        (PositionalOnly(), ["mask"], "'x', which comes before 'mask', is missing"),
    ],
)
def test_other_arguments_are_refused_with_the_parameters(
    module: nn.Module, names: list[str], text: str
) -> None:
    with pytest.raises(ServiceError, match=text.replace("(", r"\(")) as caught:
        signature_of(module).bind(names)
    assert caught.value.reason is ErrorReason.INPUT_REJECTED


@pytest.mark.parametrize("order", [("x", "mask"), ("mask", "x")])
@pytest.mark.parametrize(
    "module", [Plain(), PositionalOnly(), Decorated(), hooked(with_kwargs=False), hooked(with_kwargs=True)]
)
def test_a_call_has_each_value_at_its_parameter(module: nn.Module, order: tuple[str, str]) -> None:
    values = {"x": torch.tensor(1), "mask": torch.tensor(2)}
    args, kwargs = signature_of(module).called(order, [values[name] for name in order])
    x, mask, scale = module(*args, **kwargs)
    is_raised = bool(module._forward_pre_hooks) and not module._forward_pre_hooks_with_kwargs
    assert (int(x), int(mask), scale) == (1 + is_raised, 2, None)


def test_values_of_stars_come_behind_those_before_them() -> None:
    args, kwargs = signature_of(Starred()).called(["first", "", "", "other"], [1, 2, 3, 4])
    assert Starred()(*args, **kwargs) == (1, (2, 3), {"other": 4})


def by_both(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, Any]:
    return (x,), {"y": y}


@pytest.mark.parametrize(
    ("example", "named"),
    [
        ((PAIR, {}), [("", ""), ("x", "y"), ("", "y")]),
        (((), {"x": PAIR[0], "y": PAIR[1]}), [("x", "y")]),
        (by_both(*PAIR), [("x", "y"), ("", "y")]),
    ],
    ids=["by position", "by name", "both"],
)
def test_an_exported_program_takes_arguments_as_it_was_exported(
    example: tuple[Any, Any], named: list[tuple[str, str]]
) -> None:
    module = torch.export.export(Sum(), *example).module()
    signature = signature_of(module)
    for names in named:
        bound = signature.bind(names)
        assert bound == ("x", "y")
        args, kwargs = signature.called(bound, PAIR)
        assert torch.equal(module(*args, **kwargs), PAIR[0] - PAIR[1])
    with pytest.raises(ServiceError, match="it takes x, y"):
        signature.bind(["", "", ""])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_scripted_model_has_names_and_a_traced_one_takes_positions_and_names() -> None:
    scripted, traced = torch.jit.script(Sum()), torch.jit.trace(Sum(), PAIR)
    assert signature_of(scripted).bind(["", ""]) == ("x", "y")
    assert signature_of(traced).bind(["", ""]) == ("", "")
    for module in (scripted, traced):
        signature = signature_of(module)
        for names in (("", ""), ("x", "y"), ("", "y")):
            args, kwargs = signature.called(signature.bind(names), PAIR)
            assert torch.equal(module(*args, **kwargs), PAIR[0] - PAIR[1])
