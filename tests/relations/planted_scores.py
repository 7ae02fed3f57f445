"""Planted faults of classes and attributions: one for each relation of `scores.py`, which must fail on it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.relations.planted import plant_other_copy
from trocar._analysis import prediction
from trocar._attribution import attribution_inputs
from trocar._attribution.attribution_request import AttributionRequest
from trocar._sync.analysis import attribution_passes

Patch = pytest.MonkeyPatch


def _combined(change: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """Return a fault of what gradient methods make of a pass."""

    def plant(patch: Patch) -> None:
        original = attribution_passes.combined
        patch.setattr(attribution_passes, "combined", lambda *given: change(original(*given)))

    return plant


def _remembering() -> Callable[[Any], Any]:
    last = [0.0]

    def change(values: Any) -> Any:
        changed = values + last[0]
        last[0] = float(np.abs(values).max())
        return changed

    return change


def _lists_are_reversed(patch: Patch) -> None:
    original = attribution_inputs.array_input

    def changed(inputs: Any) -> Any:
        return original(inputs[::-1] if isinstance(inputs, list) else inputs)

    patch.setattr(attribution_passes, "array_input", changed)


def _classes_of_the_first_pass(patch: Patch) -> None:
    def positions(_: Any, group: slice, copies: int) -> list[int]:
        return list(range(group.stop - group.start)) * copies

    patch.setattr(AttributionRequest, "_positions", positions)


def _always_a_softmax(patch: Patch) -> None:
    original = prediction.activated
    patch.setattr(prediction, "activated", lambda values, _: original(values, "softmax"))


PLANTED: dict[str, Callable[[Patch], None]] = {
    "alone": _combined(lambda values: values / np.abs(values).max()),
    "order": _combined(lambda values: np.concatenate([1.5 * values[:1], values[1:]])),
    "position": _lists_are_reversed,
    "sizes": _classes_of_the_first_pass,
    "by hand": _always_a_softmax,
    "company": _combined(_remembering()),
    "local": plant_other_copy,
}
"""The faults by relation; `gateway` has a test of its own."""
