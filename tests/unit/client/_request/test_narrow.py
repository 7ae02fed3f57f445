"""float32 in 16 bits, against torch's own casts, bit for bit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from trocar._request.narrow import check_wire, narrowed

CORNERS = np.array(
    (
        *(0.0, -0.0, 1.0, 1 + 2**-8, 1 + 2**-9, 1 + 3 * 2**-9, -(1 + 2**-9), 3.4e38, -3.4028235e38, 1e-40),
        *(1e-45, np.inf, -np.inf, np.nan, 65504.0, -65504.0, 65519.0, 2**-24, 2**-25, 1.1 * 2**-25),
    ),
    np.float32,
)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.int16).numpy().view(np.uint16)


@given(arrays(np.uint32, st.integers(0, 40)))
def test_bfloat16_is_rounded_as_torch_does(bits: np.ndarray) -> None:
    values = np.concatenate([bits.view(np.float32), CORNERS])
    wanted = bits_of(torch.from_numpy(values).to(torch.bfloat16))
    found = narrowed(values, "bfloat16")
    is_number = ~np.isnan(values)
    assert np.array_equal(found[is_number], wanted[is_number])
    widened = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert np.array_equal(np.isnan(widened), np.isnan(values))


@given(arrays(np.float32, st.integers(0, 40), elements=st.floats(-65504, 65504, width=32)))
def test_float16_is_rounded_as_torch_does(values: np.ndarray) -> None:
    values = np.concatenate(
        [values, CORNERS[np.isnan(CORNERS) | (abs(CORNERS) <= 65519) | np.isinf(CORNERS)]]
    )
    wanted = torch.from_numpy(values).to(torch.float16).numpy()
    assert np.array_equal(narrowed(values, "float16"), wanted, equal_nan=True)


@pytest.mark.parametrize("value", [65520.0, -65520.0, 3e38])
def test_what_float16_cannot_hold_is_refused(value: float) -> None:
    values = np.zeros(1 << 19, np.float32)
    values[-1] = value
    with pytest.raises(ValueError, match="bfloat16"):
        narrowed(values, "float16")


@pytest.mark.parametrize("wire", ["float16", "bfloat16"])
def test_shape_stays_and_layout_does_not_matter(wire: str) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    turned = values.transpose(2, 0, 1)
    found = narrowed(turned, wire)  # type: ignore[arg-type]
    assert found.shape == (4, 2, 3)
    assert np.array_equal(found, narrowed(np.ascontiguousarray(turned), wire))  # type: ignore[arg-type]
    assert narrowed(np.zeros((0, 3), np.float32), wire).shape == (0, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", ["float32", "", "int8"])
def test_another_form_is_refused(wire: str) -> None:
    with pytest.raises(ValueError, match="must be one of"):
        check_wire(wire)
