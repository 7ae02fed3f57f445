"""Gradient edits: declared changes to the gradients of a training step.

    rules = [GradientEdit(Clamp(-1.0, 1.0), parameters=("fc.weight",))]
    with GradientEditSession(model, rules) as session:
        loss(model(batch)).backward()
    session.changed         # elements changed by each rule

# Note: [Before accumulation]
A hook on a parameter sees the gradient of each backward pass before it is added to `Parameter.grad`. Under a
clamp of 0.5, two batches can add up to 1.0.

# Note: [Copies that keep hooks]
A view that is written to later loses its hooks, and the gradient at a module's input is that of this module
alone. So a copy replaces an input, and an output that is a view, a parameter or an input itself. In-place
writes are not known beforehand: selectors are looked up in a pass in eval mode, and dropout, for example,
writes in train mode only.

# Note: [NaN stays NaN]
`clamp`, `scale`, `noise` and `normalise` propagate NaN, so that a broken step shows; `zero` and
`nan_to_num` replace it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from trocar_server.surgery.ports import Arguments, CallPorts, parameters_of
from trocar_server.surgery.sessions.gradient_changes import Change
from trocar_server.surgery.sessions.gradient_sets import SetChange
from trocar_server.surgery.sessions.gradient_sites import Inputs, Written, by_place, tensor_at
from trocar_server.surgery.sessions.hooks import Session, hook_calls
from trocar_server.surgery.sessions.taps import Target
from trocar_server.surgery.structure import put


@dataclass(frozen=True)
class GradientEdit:
    """One rule.

    Attributes:
        change: The change.
        parameters: Names of the parameters whose gradients it changes.
        targets: Values of the pass whose gradients it changes.
        late: A change of `Parameter.grad` instead, after the backward pass. See `gradient_sets`.
        when: Of a late one: `batch`, on the gradients of one backward pass, or `accumulated`, on the sum.
    """

    change: Change
    parameters: tuple[str, ...] = ()
    targets: tuple[Target, ...] = ()
    late: SetChange | None = None
    when: str = "batch"


class GradientEditSession(Session):
    """Changes gradients while the context is open, and counts the changed elements.

    Rules at one gradient act in the order of the list. Modules nearer to the input see the changed gradient.
    A value that does not depend on trained parameters has no gradient, so a rule does nothing there.

    For one forward and one backward pass; both inside the context. It removes only its own hooks.

    Args:
        model: The trainer's tree.
        rules: The rules.

    Raises:
        ValueMissingError: In the forward pass: a module has no input or output that a target names.
    """

    def __init__(self, model: nn.Module, rules: Sequence[GradientEdit]) -> None:
        self._model = model
        self._rules = tuple(rules)
        self._changed: list[Tensor | int] = [0] * len(rules)
        self._seen = [0] * len(rules)
        self._sites: dict[tuple[int, int], _Site] = {}

    @property
    def changed(self) -> list[int]:
        """Elements that each rule has changed; NaN that stays NaN is not counted. Waits for the device."""
        return [int(count) for count in self._changed]

    @property
    def seen(self) -> list[int]:
        """Elements that each rule has inspected."""
        return list(self._seen)

    def _open(self) -> None:
        self._register_parameters()
        of_calls: dict[str, dict[Target, list[int]]] = {}
        for index, rule in enumerate(self._rules):
            for target in rule.targets:
                of_calls.setdefault(target.path, {}).setdefault(target, []).append(index)
        for path, targets in of_calls.items():
            self._register(path, targets)

    def apply(self, index: int, gradient: Tensor) -> Tensor:
        """Apply one rule to a gradient, and count."""
        with torch.no_grad():
            changed = self._rules[index].change(gradient)
            differs = (changed != gradient) & ~(changed.isnan() & gradient.isnan())
            self._changed[index] = self._changed[index] + differs.sum()
        self._seen[index] += gradient.numel()
        return changed

    def _register_parameters(self) -> None:
        of_parameters: dict[str, list[int]] = {}
        for index, rule in enumerate(self._rules):
            for name in rule.parameters if rule.late is None else ():
                of_parameters.setdefault(name, []).append(index)
        named = dict(self._model.named_parameters(remove_duplicate=False))
        for name, indices in of_parameters.items():
            site = _Site(ref(named[name]), set(indices), self)
            self._handles.callback(named[name].register_hook(site.see).remove)

    def _register(self, path: str, targets: Mapping[Target, list[int]]) -> None:
        written: dict[int, list[Written]] = {}
        inputs: dict[int, Inputs] = {}
        module = self._model.get_submodule(path)
        parameters = parameters_of(module)

        def enter(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            at_call = [target for target in targets if target.call == index]
            if not at_call:
                return None
            wanted = [target for target in at_call if target.port != "out"]
            ports = CallPorts(parameters, args, kwargs)
            entries = written.setdefault(index, [])
            for (port, picks), here in by_place(wanted).items():
                value = tensor_at(ports, port, picks, here[0])
                if not _has_gradient(value):
                    continue
                own = value.clone()  # See Note: [Copies that keep hooks].
                entries.append(Written(value, own, own._version))
                ports[port] = put(ports[port], picks, own)
                self._attach(own, here, targets)
            inputs[index] = Inputs(ports)
            return ports.arguments() if wanted else None

        def leave(index: int, output: Any) -> Any:
            for entry in written.pop(index, ()):
                entry.settle()
            taken = inputs.pop(index, None)
            wanted = [target for target in targets if target.call == index and target.port == "out"]
            for (port, picks), here in by_place(wanted).items():
                value = tensor_at({port: output}, port, picks, here[0])
                if not _has_gradient(value):
                    continue
                own = _own_output(value, taken)
                output = put(output, picks, own)
                self._attach(own, here, targets)
            return output if wanted else None

        hook_calls(module, self._handles, enter, leave)

    def _attach(self, value: Tensor, here: Sequence[Target], targets: Mapping[Target, list[int]]) -> None:
        key = id(value), value._version
        site = self._sites.get(key)
        if site is None or site.tensor() is not value:
            site = self._sites[key] = _Site(ref(value), set(), self)
            self._handles.callback(value.register_hook(site.see).remove)
        for target in here:
            site.rules.update(targets[target])


def _has_gradient(value: Tensor) -> bool:
    """Return whether the graph goes on at a value: not where the model switches gradients off."""
    return value.requires_grad and torch.is_grad_enabled()


def _own_output(value: Tensor, inputs: Inputs | None) -> Tensor:
    """Return a module's output, or its copy. See Note: [Copies that keep hooks]."""
    is_input = inputs is not None and inputs.have(value)
    return value.clone() if value._is_view() or value.is_leaf or is_input else value


@dataclass
class _Site:
    """The rules at one tensor's gradient."""

    tensor: "ref[Tensor]"
    rules: set[int]
    session: GradientEditSession

    def see(self, gradient: Tensor | None) -> Tensor | None:
        """Apply the rules in order."""
        if gradient is None:  # the hook of a leaf also runs without a gradient (torch 2.14)
            return None
        for index in sorted(self.rules):
            gradient = self.session.apply(index, gradient)
        return gradient
