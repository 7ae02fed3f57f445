"""Walk: the layouts of all values of a pass, from one pass with tags.

layouts = walk(model, ((ids,), {}), {}, input_dims, {}).layouts
layouts.find("encoder.layer.0", 0, "out", ())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trocar_server.surgery.axes.axis import Axis, Dims, Kind, made, size_of
from trocar_server.surgery.axes.layout import Key, Layouts, layout_of
from trocar_server.surgery.axes.operation import dims_of, put_dims
from trocar_server.surgery.axes.tagging import Tagging
from trocar_server.surgery.ports import CallPorts
from trocar_server.surgery.recording.function_layouts import FunctionDims
from trocar_server.surgery.recording.recording import hooked
from trocar_server.surgery.structure import leaves
from trocar_server.tensors.reductions.padding import MASKS

Watching: TypeAlias = Callable[[FunctionDims], AbstractContextManager[object]]


class _LayoutRecorder:
    """Notes the dimensions of each value when a module is called and when it returns."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.dims: dict[Key, Dims] = {}
        self._modules = modules
        self._calls: Counter[str] = Counter()
        self._open: dict[str, list[tuple[int, CallPorts]]] = {}

    def enter(self, path: str, ports: CallPorts) -> None:
        """Note the inputs of a call."""
        number = self._calls[path]
        self._calls[path] += 1
        self._open.setdefault(path, []).append((number, ports))
        for port, value in ports.items():
            self._note(path, number, port, value)

    def leave(self, path: str, output: Any) -> None:
        """Note the outputs of a call."""
        number, ports = self._open[path].pop()
        module = self._modules[path]
        if isinstance(module, nn.RNNBase):
            _put_recurrent(module, ports, output)
        self._note(path, number, "out", output)

    def _note(self, path: str, number: int, port: str, value: Any) -> None:
        for picks, leaf in leaves(value, with_empty=port == "out"):
            if isinstance(leaf, Tensor) and not leaf.is_nested:
                self.dims[path, number, port, picks] = dims_of(leaf)


def _put_recurrent(module: nn.RNNBase, ports: CallPorts, output: Any) -> None:
    """Set the dimensions of a recurrent layer's outputs, whose steps torch computes one by one."""
    value = next((leaf for _, leaf in leaves(ports.get("in")) if isinstance(leaf, Tensor)), None)
    if value is None or not isinstance(output, tuple) or not isinstance(output[0], Tensor):
        return  # a packed sequence
    dims = dims_of(value)
    put_dims(output[0], (*dims[:-1], made(Kind.CHANNELS, output[0].shape[-1])))
    batch = dims[:-1][1 - module.batch_first : 2 - module.batch_first] if value.dim() == 3 else ()
    for _, state in leaves(output[1]):
        layers = made(Kind.FIXED, state.shape[0])
        put_dims(state, (layers, *batch, made(Kind.CHANNELS, state.shape[-1])))


@dataclass(frozen=True)
class Walk:
    """What one pass with tags shows.

    Attributes:
        layouts: Of all values.
        shapes: Their shapes in this pass.
        first_axis: The name of the first axis of the inputs.
    """

    layouts: Layouts
    shapes: Mapping[Key, tuple[int, ...]]
    first_axis: str


def walk(
    module: nn.Module,
    called: tuple[Sequence[Any], Mapping[str, Any]],
    named: Mapping[str, Any],
    dims: Iterable[tuple[Tensor, Dims]],
    masks: Mapping[str, str],
    watching: Watching | None = None,
) -> Walk:
    """Run one pass, and return the layouts of its values.

    Args:
        module: The model; the hooks are removed afterwards.
        called: Positional and keyword inputs.
        named: The inputs by name.
        dims: Tensors of the inputs, and what their dimensions are.
        masks: The arguments that mask axes of the inputs, by the axis's name, as far as the model tells.
        watching: Returns a context that reports the calls of functions; None without their layouts.

    Raises:
        Exception: The model's error on such inputs.
    """
    modules = dict(module.named_modules())
    recorder, tagging = _LayoutRecorder(modules), Tagging()
    inputs = list(dims)
    for tensor, own in inputs:
        put_dims(tensor, own)
    functions = FunctionDims()
    watch = nullcontext() if watching is None else watching(functions)
    with torch.no_grad(), hooked(modules, recorder), tagging, watch:
        module(*called[0], **called[1])
    masks = {**_masked_axes(named), **masks}
    _name_rest(inputs, tagging.mixed)
    dims_of_values = {**recorder.dims, **functions.dims}
    by_value = {key: layout_of(own, masks) for key, own in dims_of_values.items()}
    shapes = {key: tuple(map(size_of, own)) for key, own in dims_of_values.items()}
    first = next((digit.axis.real for _, own in inputs for digit in own[0][:1]), None)
    first_axis = "" if first is None else first.name or str(first.kind)
    return Walk(Layouts(by_value, dict(tagging.missing)), shapes, first_axis)


def _name_rest(inputs: Iterable[tuple[Tensor, Dims]], mixed: Container[Axis]) -> None:
    """Name axes of inputs of which the pass has shown only that they are not channels.

    Samples do not depend on each other: of a module that takes time first, they are the other one of these.
    """
    for _, dims in inputs:
        axes = [digit.axis.real for dim in dims for digit in dim]
        rest = [axis for axis in axes if axis.kind is Kind.UNKNOWN]
        apart = [axis for axis in rest if axis not in mixed]
        if rest and axes[0].kind is Kind.BATCH and axes[0] in mixed and len(apart) == 1:
            axes[0].kind, axes[0].name = Kind.NAMED, "positions"
            apart[0].become(Axis(Kind.BATCH, apart[0].size))
        for number, axis in enumerate((axis for axis in rest if axis.kind is Kind.UNKNOWN), start=1):
            axis.become(Axis(Kind.NAMED, axis.size, "positions" if number == 1 else f"positions{number}"))


def _masked_axes(named: Mapping[str, Any]) -> dict[str, str]:
    """Return the argument that masks an axis of the inputs, by the axis's name; an unknown axis gets one."""
    masked: dict[str, str] = {}
    for name in MASKS:
        mask = named.get(name)
        if not isinstance(mask, Tensor) or mask.dim() != 2 or not dims_of(mask)[1]:
            continue
        axis = dims_of(mask)[1][0].axis.real
        axis.become(Axis(Kind.NAMED, axis.size, name.replace("attention_mask", "tokens")))
        masked.setdefault(axis.real.name, name)
    return masked
