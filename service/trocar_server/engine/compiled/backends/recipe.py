"""Recipe of a compiled variant: values of one pass of one model, for any batch size."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trocar_server.surgery import EditTarget, Surgery, Target


@dataclass(frozen=True)
class ArgumentSpec:
    """One argument: its dtype, its shape without the batch dimension, and how it is passed."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    keyword: str = ""
    """Its name in the call of the forward; empty for one passed by position. These come first, in order."""

    def example(self, batch: int) -> torch.Tensor:
        """Return a seeded argument of this shape and dtype."""
        shape = (batch, *self.row_shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(self.dtype)


@dataclass(frozen=True)
class Recipe:
    """The values that a compiled variant computes.

    Attributes:
        arguments: Those of the forward.
        targets: The values wanted: of calls of modules, no gradients and no parameters.
        before: Edits that taps see, without their tensors.
        after: Edits that taps at the same value do not see.
        operand_counts: The number of tensors of each edit of the request. They follow the arguments of a
            run, so that calls which differ only in these share a recording.
        negative_zeros: As in the request: options of edits that are -0.0 equal those that are 0.0.
    """

    arguments: tuple[ArgumentSpec, ...]
    targets: tuple[Target, ...]
    before: tuple[EditTarget, ...] = ()
    after: tuple[EditTarget, ...] = ()
    operand_counts: tuple[int, ...] = ()
    negative_zeros: tuple[tuple[int, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in the order in which a compiled variant returns them."""
        return tuple(target.name for target in self.targets)

    @property
    def edited(self) -> frozenset[str]:
        """The names of the edited values."""
        return frozenset(entry.target.name for entry in (*self.before, *self.after))

    def called(
        self, inputs: Sequence[torch.Tensor]
    ) -> tuple[Sequence[torch.Tensor], Mapping[str, torch.Tensor]]:
        """Return the positional and the keyword arguments of a call of the forward."""
        pairs = list(zip(self.arguments, inputs, strict=True))
        positional = [tensor for spec, tensor in pairs if not spec.keyword]
        return positional, {spec.keyword: tensor for spec, tensor in pairs if spec.keyword}

    def bound(self, given: Sequence[torch.Tensor]) -> tuple[Sequence[torch.Tensor], Surgery]:
        """Return the arguments of the forward and the edits with theirs, from the tensors of a run."""
        count = len(self.arguments)
        tensors = iter(given[count:])
        operands = [tuple(next(tensors) for _ in range(size)) for size in self.operand_counts]
        before, after = (
            tuple(replace(entry, operands=operands[entry.position]) for entry in entries)
            for entries in (self.before, self.after)
        )
        return given[:count], Surgery(before, after)


def copied(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of arguments, into which a pass may write."""
    return [argument.clone() for argument in arguments]


def is_compilable(targets: Sequence[Target]) -> bool:
    """Whether a compiled variant can compute the values: only outputs and inputs of module calls."""
    return bool(targets) and all(map(_is_of_a_call, targets))


def is_recordable(recipe: Recipe) -> bool:
    """Whether a recorded pass can make the edits: of values of module calls, from tensors of the request."""
    return all(
        _is_of_a_call(entry.target) and entry.edit.operation.is_on_values and not entry.found
        for entry in (*recipe.before, *recipe.after)
    )


def _is_of_a_call(target: Target) -> bool:
    return target.kind == "module" and target.parameter is None and not target.is_gradient
