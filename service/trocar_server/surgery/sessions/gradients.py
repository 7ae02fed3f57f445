"""Gradient session: gradients of a pass, collected and changed during backward.

    with GradientSession(model, [GradientPoint(target)]) as session:
        output = model(batch)
    session.backward(output.sum())
    session.values[target.name]

# Note: [Start of the autograd graph]
No parameter and no input of a deployed model requires a gradient. The first value of the pass whose gradient
is requested becomes a leaf, so autograd saves nothing of the layers before it. Later values are in its graph.

# Note: [A gradient at a place]
Gradients are caught with `Tensor.register_hook` on forward values. `register_full_backward_hook` fails beside
in-place modules (26 of 67 modules of resnet18, torch 2.14), while a tensor's hook belongs to the value that
the tensor had when it was registered, whatever is written to it later. Three cases need a tensor of our own:
a view that is written to later loses its hooks; the gradient at a module's input is that of this module
alone, not of what else takes the same tensor; and a module that returns its input, as `nn.Identity` and
dropout in eval mode do, has two gradients, of which the output's comes first.
"""

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import nn

from trocar_server.surgery.guard import PassGuard
from trocar_server.surgery.parameter_swaps import ParameterSwaps
from trocar_server.surgery.ports import Arguments, CallPorts, parameters_of
from trocar_server.surgery.sessions.gradient_errors import differentiable, independent, no_gradient_of
from trocar_server.surgery.sessions.gradient_sites import (
    GradientPoint,
    Inputs,
    Site,
    Written,
    alias,
    by_place,
    tensor_at,
)
from trocar_server.surgery.sessions.hooks import Session, hook_calls
from trocar_server.surgery.sessions.taps import Collector, Target, ValueMissingError
from trocar_server.surgery.structure import leaves, put


class GradientSession(Session):
    """Begins the graph at the first value whose gradient is requested, and observes gradients in backward.

    Several points at one value, also under other names (a container and its last module often return the
    same tensor), see its gradient in this order: edits, taps, edits after taps; each in the order of the
    request. Modules nearer to the input see the changed gradient.

    Args:
        model: A replica, leased by the caller. Gradients must be enabled while it runs.
        points: The actions, with their targets.
        anchors: Values with respect to which the objective itself takes gradients.
        guard: Checked during the backward pass.
        collector: Of the taps of the same pass: marked busy during function calls that the session makes.

    Attributes:
        values: Collected gradients by the name of their target.
        edited: The names of the gradients that were computed and edited.
        anchors: The anchors' tensors by name, in the graph.
    """

    def __init__(
        self,
        model: nn.Module,
        points: Sequence[GradientPoint],
        anchors: Sequence[Target] = (),
        guard: PassGuard | None = None,
        collector: Collector | None = None,
    ) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.edited: set[str] = set()
        self.anchors: dict[str, torch.Tensor] = {}
        self._model = model
        self._points: dict[Target, list[GradientPoint]] = {anchor: [] for anchor in anchors}
        for point in points:
            self._points.setdefault(point.target, []).append(point)
        self._anchors = frozenset(anchors)
        self._guard = guard
        self._collector = collector or Collector()
        self._busy = self._collector.busy
        self._starts: list[torch.Tensor] = []
        self._sites: dict[tuple[int, int], Site] = {}

    def _open(self) -> None:
        of_calls: dict[str, list[Target]] = {}
        swaps = ParameterSwaps(self._model, self._handles)
        for target in self._points:
            if target.parameter is not None:
                self._begin_at_parameter(swaps, target)
            else:
                of_calls.setdefault(target.path, []).append(target)
        for path, targets in of_calls.items():
            self._register(path, targets)
        if self._guard is not None:
            self._watch_backward(self._guard)

    def backward(self, objective: torch.Tensor) -> None:
        """Backpropagate a scalar to the start of the graph.

        Raises:
            ServiceError: `NOT_DIFFERENTIABLE`, the scalar does not depend on any requested value, or torch
            has no derivative of an operation in between.
            PassAborted: The guard stopped the pass.
        """
        self.values.clear()  # second derivatives ran the hooks before
        if not objective.requires_grad:
            raise independent([target.name for target in self._points])
        with differentiable():
            torch.autograd.grad(objective, self._starts, allow_unused=True)

    def gradient(self, number: torch.Tensor, anchor: str) -> torch.Tensor:
        """Return the gradient of a scalar with respect to an anchor, itself differentiable.

        Raises:
            ServiceError: `NOT_DIFFERENTIABLE`, the scalar does not depend on the anchor.
            ValueMissingError: The pass did not reach the anchor.
        """
        if anchor not in self.anchors:
            raise ValueMissingError(anchor)
        if not number.requires_grad:
            raise independent([anchor])
        with differentiable():
            (result,) = torch.autograd.grad(
                number, self.anchors[anchor], create_graph=True, allow_unused=True
            )
        if result is None:
            raise independent([anchor])
        return result

    def _begin_at_parameter(self, swaps: ParameterSwaps, target: Target) -> None:
        path, name = target.path, target.parameter or ""
        try:
            value = swaps.current(path, name)
        except KeyError:
            raise ValueMissingError(target.name) from None
        if not any(value is start for start in self._starts):  # tied to a parameter that is a start already
            value = self._start(value, target)
            swaps.replace(path, name, value)
        self._attach(value, [target])

    def _register(self, path: str, targets: Sequence[Target]) -> None:
        """Register hooks at the selected calls of a module."""
        written: dict[int, list[Written]] = {}
        inputs: dict[int, Inputs] = {}
        module = self._model.get_submodule(path)
        parameters = parameters_of(module)

        def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            at_call = [target for target in targets if target.call == index]
            if not at_call:
                return None
            ports = CallPorts(parameters, args, kwargs)
            with self._busy():
                written[index] = self._enter_call([t for t in at_call if t.port != "out"], ports)
            inputs[index] = Inputs(ports)
            return ports.arguments() if written[index] else None

        def leave(index: int, output: Any) -> Any:
            wanted = [target for target in targets if target.call == index and target.port == "out"]
            with self._busy():
                for entry in written.pop(index, ()):
                    entry.settle()
                taken = inputs.pop(index, None)
                return self._leave_call(wanted, output, taken) if wanted and taken is not None else None

        hook_calls(module, self._handles, enter, leave)

    def _enter_call(self, targets: Sequence[Target], ports: dict[str, Any]) -> "list[Written]":
        """Replace inputs of a call by tensors of the session."""
        written = []
        for (port, picks), here in by_place(targets).items():
            value = tensor_at(ports, port, picks, here[0])
            own = self._own_input(value, here[0])
            written.append(Written(value, own, own._version))
            ports[port] = put(ports[port], picks, own)
            self._attach(own, here)
        return written

    def _leave_call(self, targets: Sequence[Target], output: Any, inputs: Inputs) -> Any:
        for (port, picks), here in by_place(targets).items():
            own = self._own_output(tensor_at({port: output}, port, picks, here[0]), here[0], inputs)
            output = put(output, picks, own)
            self._attach(own, here)
        return output

    def _own_input(self, value: torch.Tensor, target: Target) -> torch.Tensor:
        if not value.requires_grad:
            value = self._start(value, target)
            return value.clone() if target.clone else value
        return value.clone() if target.clone else alias(value)

    def _own_output(self, value: torch.Tensor, target: Target, inputs: Inputs) -> torch.Tensor:
        if not value.requires_grad:
            value = self._start(value, target)
            return value.clone() if target.clone else value
        is_input = inputs.have(value)
        if target.clone and (is_input or value._is_view()):
            return value.clone()
        return alias(value) if is_input else value

    def _start(self, value: torch.Tensor, target: Target) -> torch.Tensor:
        """Begin the graph here. See Note: [Start of the autograd graph]."""
        if not (value.is_floating_point() or value.is_complex()):
            raise no_gradient_of(target.name, value.dtype)
        start = value.detach().requires_grad_()
        self._starts.append(start)
        return start

    def _attach(self, value: torch.Tensor, targets: Sequence[Target]) -> None:
        """Attach the points of these targets to the gradient of a tensor."""
        for target in targets:
            if target in self._anchors:
                self.anchors[target.name] = value
            if self._points[target]:
                self._collector.edited.add(target.name)
                self._site(value).points.extend(self._points[target])

    def _site(self, value: torch.Tensor) -> "Site":
        key = id(value), value._version
        site = self._sites.get(key)
        if site is None or site.tensor() is not value:
            site = self._sites[key] = Site(ref(value), [], self.values, self.edited)
            value.register_hook(site.see)
        return site

    def _watch_backward(self, guard: PassGuard) -> None:
        """Check the guard when the backward pass reaches the output of a leaf module."""

        def leave(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            with self._busy():
                for _picks, leaf in leaves(output):
                    if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                        leaf.register_hook(lambda _gradient: guard.check())

        for module in self._model.modules():
            if not any(True for _ in module.children()):
                self._handles.callback(module.register_forward_hook(leave).remove)
