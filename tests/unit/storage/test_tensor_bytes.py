"""The bytes of tensors, against NumPy's."""

import pytest
import torch

from trocar_server.storage.tensor_bytes import bytes_of

VALUE = torch.arange(24.0).view(2, 3, 4)


@pytest.mark.parametrize(
    "tensor",
    [
        VALUE,
        VALUE.mT,
        VALUE[:1, :1, ::2],
        VALUE[:1].flatten(1)[:, 4],  # one element of stride 12
        VALUE[1:, 2:, 3:],
        VALUE[:0],
        VALUE[0, 0, 1],
        VALUE.half()[:1, 1:2],
        VALUE > 3,
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)}, strides {tensor.stride()}, {tensor.dtype}",
)
def test_bytes_are_those_of_numpy(tensor: torch.Tensor) -> None:
    assert bytes_of(tensor).numpy().tobytes() == tensor.numpy().tobytes()


def test_bytes_of_a_dense_tensor_are_its_own_memory() -> None:
    assert bytes_of(VALUE).data_ptr() == VALUE.data_ptr()
    assert bytes_of(VALUE[1]).data_ptr() == VALUE[1].data_ptr()
