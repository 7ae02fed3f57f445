"""Inputs of a trial are as large as a compiled pass may get."""

import pytest
import torch

from trocar_server.engine.run.finite import largest_input, scaled


@pytest.mark.parametrize("values", [[0.0, 0.0], [0.5, -0.25], [-3.0, 1.0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_are_scaled_to_the_largest_that_is_used(values: list[float], dtype: torch.dtype) -> None:
    (found,) = scaled([torch.tensor(values, dtype=dtype)])
    assert float(found.abs().max()) == pytest.approx(largest_input(dtype), rel=1e-2)
    assert found.isfinite().all()


def test_inputs_without_fractions_or_elements_stay() -> None:
    given = [torch.tensor([1, 2]), torch.empty(0)]
    assert all(torch.equal(found, each) for found, each in zip(scaled(given), given, strict=True))
