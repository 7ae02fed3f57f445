"""Values as JSON and tensors, and back."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.step.trainer_state import pack, unpack

plain = (
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
)
nested = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)


def there_and_back(value: Any) -> Any:
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(pack(value, "x", tensors), allow_nan=False)
    return unpack(json.loads(text), tensors)


@given(nested)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    found = there_and_back(value)
    assert found == value
    assert repr(found) == repr(value)  # tuples stay tuples, whole numbers stay whole, 0.0 keeps its sign


def test_numbers_that_json_does_not_know() -> None:
    low, high, nan = there_and_back([-math.inf, math.inf, math.nan])
    assert (low, high) == (-math.inf, math.inf)
    assert math.isnan(nan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_come_back_bit_equal_and_as_copies(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1, 2]]).to(dtype)
    found = there_and_back({"a": [tensor, (tensor[0, 1], None)]})
    assert torch.equal(found["a"][0], tensor)
    assert found["a"][0].dtype == dtype
    assert found["a"][1][0].shape == ()
    found["a"][0].zero_()
    assert tensor.any()


def test_what_cannot_be_stored_is_named() -> None:
    with pytest.raises(TypeError, match="x/a: a object"):
        pack({"a": object()}, "x", {})


@pytest.mark.parametrize("value", [{}, {"tensor": "x"}, {"tensor": 3}, {"a": 1}, {"float": "x"}, {"dict": 3}])
def test_what_was_not_packed_is_refused(value: Any) -> None:
    with pytest.raises(ServiceError) as caught:
        unpack([value], {})
    assert caught.value.reason is ErrorReason.CHECKPOINT_CORRUPT
