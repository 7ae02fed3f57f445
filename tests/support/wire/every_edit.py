"""Every operation at every value of a model: on a server, and by hand with plain torch hooks.

    hand = Hand(rebuilt_by_name("resnet18"))
    outcome(client, "resnet18", hand, place, "scale")        # "equal", "refused: ..." or what is wrong

A model works on a copy whose modules do not work in place, so that plain hooks see what they should.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models import vit_b_16

import trocar
from tests.support.oracles.by_hand import plain
from tests.support.oracles.oracle import Array, noise

PORTS = ("out", "in", "param", "grad_out", "grad_in", "param_grad")
ALPHA, SEED = 0.5, 3


def small_vit() -> Any:
    """Return a vit_b_16 for images of 64 x 64 whose head is not all zeros."""
    model: Any = vit_b_16(image_size=64)
    nn.init.normal_(model.heads.head.weight, std=0.02)
    return model


@dataclass(frozen=True)
class Place:
    """One value of a pass, or the gradient with respect to it.

    Attributes:
        name: The selector that stands for it alone.
        path: Of the module.
        call: Which call.
        port: One of `PORTS`.
        key: The element of what it takes or returns, or the name of a parameter; empty for the whole output.
        shape: Of the value.
        dtype: Of the value.
    """

    name: str
    path: str
    call: int
    port: str
    key: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def is_gradient(self) -> bool:
        """Whether the gradient is meant."""
        return "grad" in self.port

    @property
    def is_float(self) -> bool:
        """Whether it has a gradient, and any operation makes sense."""
        return self.dtype == "float32"

    @property
    def is_parameter(self) -> bool:
        """Whether it is no value of a call."""
        return self.port.startswith("param")

    def gradient(self) -> "Place":
        """Return the place of the gradient with respect to this value."""
        path, _, port = self.name.rpartition("/") if "/" in self.name else (self.name, "", "out")
        base, bracket, rest = path.partition("[") if "/" not in self.name else (path, "", "")
        name = f"{path}/param_grad{port[5:]}" if self.is_parameter else f"{base}/grad_{port}{bracket}{rest}"
        kind = "param_grad" if self.is_parameter else f"grad_{self.port}"
        return Place(name, self.path, self.call, kind, self.key, self.shape, self.dtype)


def places(client: trocar.Client, model_id: str, shape: tuple[int, ...]) -> list[Place]:
    """Return every value that a pass on inputs of this shape has, and every gradient."""
    found = []
    for info in client.plan(model_id, shape, ["**", "**/in", "**/param(*)"]).feature_maps.values():
        port, _, parameter = info.port.partition("(")
        key = parameter.removesuffix(")") if port == "param" else info.pick.strip("[]")
        found.append(Place(info.name, info.path, info.call_index, port, key, info.shape, info.dtype))
    return [*found, *(place.gradient() for place in found)]


Operation = tuple[Callable[[tuple[int, ...]], dict[str, Any]], Callable[..., torch.Tensor]]
"""Makes the options for a value of a shape, and computes what becomes of a value."""


def channel_dim(rank: int) -> int:
    """Return which dimension is that of the channels in these cases, whatever the model says."""
    return {1: 0, 3: 2}.get(rank, 1)


def _vectors(shape: tuple[int, ...], count: int) -> Array:
    size = shape[channel_dim(len(shape))] if shape else 1
    few = min(count, max(size - 1, 1))  # all of the space would leave nothing but rounding
    return noise(few, size, seed=5) - np.float32(0.5)


def _drawn(function: Callable[..., torch.Tensor], shape: Any) -> torch.Tensor:
    return function(shape, generator=torch.Generator().manual_seed(SEED))


def _steered(value: torch.Tensor) -> torch.Tensor:
    dim = channel_dim(value.ndim)
    direction = torch.from_numpy(_vectors(tuple(value.shape), 1)[0])
    return value + ALPHA * direction.reshape([-1] + [1] * (value.ndim - dim - 1))


def _capped(value: torch.Tensor) -> torch.Tensor:
    last = value.movedim(channel_dim(value.ndim), -1)
    direction = torch.from_numpy(_vectors(tuple(value.shape), 1)[0]).to(last.dtype)
    unit = direction / direction.norm()
    component = (last @ unit)[..., None]
    capped: torch.Tensor = last + (component.clamp(-0.1, 0.2) - component) * unit
    return capped.movedim(-1, channel_dim(value.ndim))


def _projected(value: torch.Tensor) -> torch.Tensor:
    dim = channel_dim(value.ndim)
    basis = torch.from_numpy(_vectors(tuple(value.shape), 2)).double()
    onto = torch.linalg.pinv(basis) @ basis
    found: torch.Tensor = (value.movedim(dim, -1).double() @ onto).movedim(-1, dim).float()
    return found


def _top(value: torch.Tensor) -> torch.Tensor:
    dim = channel_dim(value.ndim)
    places = value.topk(1, dim).indices
    return torch.zeros_like(value).scatter(dim, places, value.gather(dim, places))


def _normalised(value: torch.Tensor) -> torch.Tensor:
    norms = value.double().flatten(1).norm(dim=1) if value.ndim > 1 else value.double().abs()
    factors = (1 / norms).clamp(max=1).nan_to_num(1.0)
    return (value.double() * factors.reshape([-1] + [1] * (value.ndim - 1))).float()


OPERATIONS: dict[str, Operation] = {
    "set": (lambda _: {"value": 0.25}, lambda value: torch.full_like(value, 0.25)),
    "zero": (lambda _: {}, torch.zeros_like),
    "add": (lambda _: {"value": 0.25}, lambda value: value + 0.25),
    "scale": (lambda _: {"factor": 0.5}, lambda value: value * 0.5),
    "affine": (lambda _: {"scale": 2.0, "shift": 0.1}, lambda value: value * 2 + 0.1),
    "clamp": (lambda _: {"low": -0.1, "high": 0.1}, lambda value: value.clamp(-0.1, 0.1)),
    "noise": (
        lambda _: {"scale": 0.1, "seed": SEED},
        lambda value: value + 0.1 * _drawn(torch.randn, value.shape),
    ),
    "mean_ablate": (lambda _: {}, lambda value: value.mean(0, keepdim=True).expand_as(value).clone()),
    "resample": (lambda _: {"seed": SEED}, lambda value: value[_drawn(torch.randperm, len(value))]),
    "swap": (lambda _: {"source": "other"}, lambda value, other: other),
    "add_input": (lambda _: {}, lambda value, other: value + other),
    "steer": (lambda shape: {"direction": _vectors(shape, 1)[0], "alpha": ALPHA}, _steered),
    "cap": (lambda shape: {"direction": _vectors(shape, 1)[0], "low": -0.1, "high": 0.2}, _capped),
    "project_out": (lambda shape: {"basis": _vectors(shape, 2)}, lambda value: value - _projected(value)),
    "project_onto": (lambda shape: {"basis": _vectors(shape, 2)}, _projected),
    "top_k": (lambda _: {"k": 1}, _top),
    "dropout": (
        lambda _: {"probability": 0.5, "seed": SEED},
        lambda value: torch.where(_drawn(torch.rand, value.shape) < 0.5, 0, value * 2),
    ),
    "cast": (lambda _: {"dtype": "float16"}, lambda value: value.half().float()),
    "skip": (lambda _: {}, lambda value, other: other),
    "normalise": (lambda _: {"max_norm": 1.0}, _normalised),
    "nan_to_num": (lambda _: {}, torch.nan_to_num),
}

_OF_CHANNELS = ("steer", "cap", "project_out", "project_onto", "top_k")
_ANYWHERE = ("set", "zero", "add", "scale", "affine", "clamp", "noise", "cast", "dropout", "nan_to_num")
"""What works on floats of any shape."""


def must_work(place: Place, operation: str) -> bool:
    """Whether a refusal would be wrong, if the value, or its gradient, is there at all."""
    has_dimensions = bool(place.shape) and math.prod(place.shape) > 0
    is_forward_out = place.port == "out"
    if not place.is_float:
        return False
    if operation in ("skip", "add_input"):
        return False
    if operation == "swap":
        return not place.is_gradient and not place.is_parameter
    if operation in ("resample", "mean_ablate") and place.is_parameter:
        return False  # without samples
    return operation in _ANYWHERE or has_dimensions or (is_forward_out and has_dimensions)


class Hand:
    """A model on which changes are made by hand.

    Args:
        model: As hosted.
        batch: Its input.
        other: The input from which swaps take values.
    """

    def __init__(self, model: Any, batch: Array, other: Array) -> None:
        self._model = plain(model).requires_grad_(False)
        self._batch, self._other = torch.from_numpy(batch), torch.from_numpy(other)

    def expected(self, place: Place, operation: str) -> dict[str, torch.Tensor | None]:
        """Return the place's value and the output; of a gradient, the gradients there and at the input.

        A gradient that does not come is None.
        """
        change = OPERATIONS[operation][1]
        if place.is_gradient:
            return self._gradients(place, change)
        if operation == "swap":
            swapped = self._forward(place, self._other, lambda value: value)[place.name]
            return self._forward(place, self._batch, lambda value: swapped)
        return self._forward(place, self._batch, change)

    def _forward(self, place: Place, batch: torch.Tensor, change: Any) -> dict[str, Any]:
        with torch.no_grad():
            return self._run(place, batch, lambda *values: change(*_needed(change, values)))

    def _gradients(self, place: Place, change: Any) -> dict[str, torch.Tensor | None]:
        came: list[torch.Tensor] = []

        def see(gradient: torch.Tensor) -> torch.Tensor:
            came.append(change(gradient))
            return came[-1]

        def hooked(value: torch.Tensor, *_: Any) -> torch.Tensor:
            value = value.requires_grad_() if place.is_parameter else value.clone()
            if value.requires_grad:
                value.register_hook(see)
            return value

        batch = self._batch.clone().requires_grad_()
        with torch.enable_grad():
            try:
                found = self._run(place, batch, hooked)
            except RuntimeError as error:  # the statistics of batch norm
                if "is not differentiable with respect to" not in str(error):
                    raise
                return {place.name: None}
            wanted = [batch, found[place.name]] if place.is_parameter else [batch]
            there, *_ = torch.autograd.grad(found["/out"][:, 1].sum(), wanted, allow_unused=True)
        return {place.name: came[0] if came else None, "/grad_in": there}

    def _run(self, place: Place, batch: torch.Tensor, change: Any) -> dict[str, Any]:
        seen: dict[str, torch.Tensor] = {}

        def changed(*values: torch.Tensor) -> torch.Tensor:
            value: torch.Tensor = change(*values)
            seen[place.name] = (
                value if place.is_gradient else value.clone()
            )  # what comes next may write to it
            return value

        if place.is_parameter:
            name = f"{place.path}.{place.key}" if place.path else place.key
            tensor = self._model.get_parameter(name) if name in dict(self._model.named_parameters()) else None
            tensor = self._model.get_buffer(name) if tensor is None else tensor
            changes = {name: changed(tensor.detach().clone())}
            return {"/out": torch.func.functional_call(self._model, changes, (batch,)), **seen}
        with _hooked(self._model.get_submodule(place.path), place, changed):
            output = self._model(batch)
        return {"/out": output, **seen}


class _hooked:  # noqa: N801 - a context
    def __init__(self, module: nn.Module, place: Place, changed: Any) -> None:
        self._place, self._changed = place, changed
        self._count, self._inputs = 0, ()
        self._handles = [
            module.register_forward_pre_hook(self._before),
            module.register_forward_hook(self._after),
        ]

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, _: nn.Module, args: Any) -> Any:
        is_wanted = self._count == self._place.call
        self._count += 1
        if is_wanted:
            self._inputs = args
        if not is_wanted or not self._place.port.endswith("in"):
            return None
        index = int(self._place.key or 0)
        return tuple(self._changed(v) if i == index else v for i, v in enumerate(args))

    def _after(self, _: nn.Module, __: Any, output: Any) -> Any:
        if self._count != self._place.call + 1 or not self._place.port.endswith("out"):
            return None
        if not self._place.key:
            return self._changed(output, *self._inputs[:1])
        index = int(self._place.key)
        return tuple(self._changed(v, *self._inputs[:1]) if i == index else v for i, v in enumerate(output))


def _needed(change: Any, values: tuple[Any, ...]) -> tuple[Any, ...]:
    code = getattr(change, "__code__", None)
    return values[: code.co_argcount if code else 1]


def outcome(
    client: trocar.Client, model_id: str, hand: Hand, place: Place, operation: Any, batch: Array, other: Array
) -> str:
    """Return how one edit went: "equal", "refused: ..." where that is right, or what is wrong."""
    options = OPERATIONS[operation][0](place.shape)
    if operation in _OF_CHANNELS and place.shape:
        options["channel_dim"] = channel_dim(len(place.shape))
    edit = trocar.edit(place.name, operation, **options)
    sources = {"other": other} if operation == "swap" else None
    try:
        if place.is_gradient:
            found = client.gradients(
                model_id, batch, of=trocar.logit(1), at=["/in", place.name], edits=edit, sources=sources
            )
        else:
            found = client.extract(model_id, batch, [place.name, "/out"], edits=edit, sources=sources)
    except (trocar.errors.EditError, trocar.errors.NotDifferentiableError) as error:
        return _refusal(hand, place, operation, error)
    except trocar.TrocarError as error:
        return f"WRONG {type(error).__name__}: {error}"
    expected = hand.expected(place, operation)
    wrong = [name for name, values in expected.items() if not _is_close(found, name, values)]
    return f"WRONG values of {wrong}" if wrong else "equal"


def _refusal(hand: Hand, place: Place, operation: str, error: trocar.TrocarError) -> str:
    kind = f"refused: {type(error).__name__}"
    if isinstance(error, trocar.errors.NotDifferentiableError):
        if place.is_gradient and place.is_float and hand.expected(place, "scale")[place.name] is not None:
            return f"WRONG {error}"
        return kind
    return f"WRONG {error}" if must_work(place, operation) else kind


def _is_close(found: trocar.FeatureMaps, name: str, expected: torch.Tensor | None) -> bool:
    if expected is None or name not in found:
        return expected is None and name not in found
    values, wanted = found[name], expected.detach().numpy()
    is_nan = np.isnan(wanted)  # a negative variance, for example
    if values.shape != wanted.shape or values.dtype != wanted.dtype or (np.isnan(values) != is_nan).any():
        return False
    values, wanted = values[~is_nan], wanted[~is_nan]
    return bool(np.abs(values - wanted).max(initial=0) <= 1e-4 * max(np.abs(wanted).max(initial=0), 1e-4))


def cases(found: list[Place]) -> Iterator[tuple[Place, str]]:
    """Yield every operation at every place."""
    for place in found:
        for operation in OPERATIONS:
            yield place, operation
