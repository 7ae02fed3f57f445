"""Tagging: what each dimension means, carried through every operator of a pass.

    with Tagging() as tagging:
        put_dims(x, (whole(batch), whole(tokens), whole(width)))
        y = model(x)
    dims_of(y)

An operator without a rule gives unknown dimensions; `missing` counts them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trocar_server.surgery.axes import shapes, values
from trocar_server.surgery.axes.axis import Axis, is_fixed
from trocar_server.surgery.axes.combining import combined
from trocar_server.surgery.axes.operation import Operation, dims_of, put_dims, unknown

_RULES = {**values.RULES, **shapes.RULES}


class Tagging(TorchDispatchMode):
    """Carries dimensions through the operators that run inside its context.

    Attributes:
        missing: Operators without a rule, and how often they ran on what depends on an input.
        mixed: Axes of the inputs whose positions depend on each other, and the operators by which.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.missing: Counter[str] = Counter()
        self.mixed: dict[Axis, set[str]] = {}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operator, and note the dimensions of its results."""
        result = func(*args, **(kwargs or {}))
        op = Operation(func, args, kwargs or {}, result)
        if op.outputs:
            self._note(op)
        return result

    def _note(self, op: Operation) -> None:
        if not op.inputs or all(is_fixed(dim) for tensor in op.inputs for dim in dims_of(tensor)):
            return  # a constant
        for output, dims in zip(op.outputs, self._dims(op), strict=True):
            put_dims(output, dims)
            if output is op.inputs[0]:
                _note_base(output)

    def _dims(self, op: Operation) -> Sequence[Sequence[Any]]:
        rule = _RULES.get(op.name)
        if rule is None and torch.Tag.pointwise in op.func.tags:
            rule = shapes.elementwise
        try:
            if rule is not None:
                dims = rule(op)
                for digit in (digit for dim in op.mixed for digit in dim):
                    self.mixed.setdefault(digit.axis.root, set()).add(op.name)
                return dims
        except (IndexError, KeyError, TypeError, ValueError, StopIteration):
            pass  # a form of the operator that its rule does not know
        self.missing[op.name] += 1
        return [unknown(output.shape) for output in op.outputs]


def _note_base(view: Tensor) -> None:
    """Let the tensor of a view that was written to have the dimensions that the view has."""
    base = view._base
    if base is None or base.dim() != view.dim():
        return
    pairs = zip(dims_of(base), dims_of(view), base.shape, view.shape, strict=True)
    put_dims(base, [combined([own, dim], size) if size == part else own for own, dim, size, part in pairs])
