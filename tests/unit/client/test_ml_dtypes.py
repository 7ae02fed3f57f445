"""bfloat16 as NumPy has it with ml_dtypes, which JAX and TensorFlow use; torch is the reference."""

import ml_dtypes
import numpy as np
import pytest
import torch

from trocar._base.tensors import float_array, to_wire
from trocar._request.inputs import wire_inputs
from trocar_api.v1 import tensor_pb2 as pb

VALUES = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)
ARRAY = VALUES.astype(ml_dtypes.bfloat16)
TENSOR = torch.from_numpy(VALUES).bfloat16()


def test_it_goes_as_its_own_bits() -> None:
    assert to_wire(ARRAY) == to_wire(TENSOR)
    assert to_wire(ARRAY).dtype == pb.DTYPE_BFLOAT16
    assert to_wire(ARRAY.T) == to_wire(TENSOR.permute(2, 1, 0))


def test_a_list_of_both_is_stacked() -> None:
    [argument], [payload] = wire_inputs([ARRAY[0], TENSOR[1]])
    assert list(argument.tensor.shape) == [2, 3, 4]
    assert bytes(payload) == bytes(to_wire(TENSOR).payload)


def test_it_widens_to_float32_exactly() -> None:
    np.testing.assert_array_equal(float_array(ARRAY), TENSOR.float().numpy())


def test_narrower_floats_are_refused_with_the_line_that_mends_them() -> None:
    with pytest.raises(TypeError, match=r'float8_e4m3fn cannot be sent: .*array\.astype\("float32"\)'):
        to_wire(VALUES.astype(ml_dtypes.float8_e4m3fn))
