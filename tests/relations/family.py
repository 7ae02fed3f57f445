"""One kind of model: how it is built, what its arguments are, and what their dimensions are."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

Array = NDArray[Any]
Inputs = dict[str, Array]

SAMPLES = "b"
"""The letter of the dimension of samples in `Family.axes`."""


@dataclass(frozen=True)
class Family:
    """One kind of model.

    Dimensions have letters: `b` samples, `t` tokens, `u` tokens of a decoder, `s` samples of sound, `l` steps
    of a sequence without a mask; others are fixed.
    """

    name: str
    """Also the id of the hosted model."""
    make: Callable[[], nn.Module]
    axes: Mapping[str, str]
    """The dimensions of each argument, a letter for each, in the order of `forward`."""
    sizes: Mapping[str, int]
    """The size of each letter except `b`."""
    masks: Mapping[str, str] = field(default_factory=dict)
    """The argument that masks the padding of a letter; it need not be sent."""
    sides: tuple[str, ...] = ()
    """On which sides padding may be without a change of the other tokens: `right`, `left`."""
    optional: tuple[str, ...] = ()
    """Arguments that need not be sent."""
    input_shape: tuple[int, ...] | None = None
    """Of the example input, for models that do not say it themselves."""
    says_nothing: bool = False
    """Whether the configuration must name its arguments."""
    is_random: bool = False
    """Whether two equal passes may differ, by torch's random numbers: only `length` asks it."""
    is_fused: bool = False
    """Whether torch computes blocks in one kernel unless a module within is hooked, as encoder layers:
    the last bits then depend on what else is tapped."""
    grows: bool = False
    """Whether images may have another height."""
    vocabulary: int = 30
    ids: tuple[str, ...] = ()
    """Arguments of indices whose names do not end in `_ids`."""
    classes: int = 0
    """Classes in dimension 1 of an output (samples, classes); 0 if the output is another."""
    tolerance: float = 2e-4
    """Of a sample alone against the same in a batch, relative to the largest value."""

    def build(self) -> nn.Module:
        """Return the model, in evaluation mode; equal weights at each call."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return self.make().eval().requires_grad_(False)

    def inputs(
        self,
        random: np.random.Generator,
        batch: int = 3,
        side: str = "right",
        lengths: Mapping[str, list[int]] | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> Inputs:
        """Return arguments by name; `lengths`: by the letter of a masked dimension, one for each sample."""
        known = {**self.sizes, **(sizes or {}), SAMPLES: batch}
        kept = {letter: _mask(counts, known[letter], side) for letter, counts in (lengths or {}).items()}
        made: Inputs = {}
        seed = int(random.integers(2**31))  # one stream for each argument: sizes of others do not change it
        for number, (name, letters) in enumerate(self.axes.items()):
            shape = tuple(known[letter] if letter in known else int(letter) for letter in letters)
            if name in self.masks.values():
                made[name] = kept.get(letters[-1], np.ones(shape, np.int64))
                continue
            value = self._values(name, shape, np.random.default_rng((seed, number)))
            for letter, mask in kept.items():
                if letter in letters:
                    value = _padded(value, mask, letters, letter)
            made[name] = value
        return made

    def _values(self, name: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
        if name == "token_type_ids":
            return np.zeros(shape, np.int64)
        if name.endswith("_ids") or name in self.ids:
            return random.integers(3, self.vocabulary, shape)
        return random.standard_normal(shape).astype(np.float32)

    def take(self, inputs: Inputs, samples: list[int]) -> Inputs:
        """Return some samples of arguments."""
        return {
            name: np.take(value, samples, self.axes[name].index(SAMPLES)) for name, value in inputs.items()
        }

    def alone(self, inputs: Inputs, sample: int) -> Inputs:
        """Return one sample, without its padding."""
        one = self.take(inputs, [sample])
        for letter, mask in self.masks.items():
            if mask in one:
                kept = np.flatnonzero(one[mask][0])
                for name, value in one.items():
                    if letter in self.axes[name]:
                        one[name] = np.take(value, kept, self.axes[name].index(letter))
        return one


def _mask(counts: list[int], size: int, side: str) -> Array:
    steps = np.arange(size)[None]
    lengths = np.asarray(counts)[:, None]
    return ((steps < lengths) if side == "right" else (steps >= size - lengths)).astype(np.int64)


def _padded(value: Array, mask: Array, letters: str, letter: str) -> Array:
    """Set what is padding to 1 in indices and to 0 in floats."""
    order = [letters.index(SAMPLES), letters.index(letter)]
    moved = np.moveaxis(value, order, (0, 1)).copy()
    moved[mask == 0] = 1 if value.dtype == np.int64 else 0
    return np.moveaxis(moved, (0, 1), order)
