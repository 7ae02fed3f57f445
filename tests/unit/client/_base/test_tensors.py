import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from trocar._base.tensors import WIRE_DTYPES, float_array, to_wire
from trocar_api.v1 import tensor_pb2 as pb

Sends = trocar.Edit | trocar.Tap | trocar.Objective


class OnlyDlpack:
    """An array of a library that NumPy knows through DLPack alone."""

    def __init__(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


@pytest.mark.parametrize("name", [name for name in WIRE_DTYPES if name != "bfloat16"])
def test_numpy_and_torch_agree_on_every_dtype(name: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(name)
    tensor = torch.from_numpy(array.copy())
    assert to_wire(array) == to_wire(tensor)
    assert to_wire(array).dtype == pb.Dtype.Value(f"DTYPE_{name.upper()}")


def test_the_table_covers_the_contract() -> None:
    assert sorted(WIRE_DTYPES.values()) == sorted(set(pb.Dtype.values()) - {pb.DTYPE_UNSPECIFIED})


def test_torch_bfloat16_goes_as_its_own_bits() -> None:
    tensor = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    wire = to_wire(tensor.T)
    assert (wire.dtype, wire.shape) == (pb.DTYPE_BFLOAT16, (4, 3))
    assert bytes(wire.payload) == tensor.detach().T.contiguous().view(torch.int16).numpy().tobytes()


def test_torch_tensors_that_need_gradients_are_sent() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert bytes(to_wire(tensor).payload) == np.ones(2, np.float32).tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12, dtype=np.float32).reshape(3, 4).T,
        np.arange(12, dtype=np.float32)[::2],
        np.arange(12, dtype=">f4"),
        np.float32(3),
        np.array(3.0),
        np.zeros((2, 0), np.float32),
    ],
)
def test_any_layout_is_sent_row_major_and_little_endian(
    array: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
) -> None:
    wire = to_wire(array)
    assert wire.shape == array.shape
    little_endian = array.astype(array.dtype.newbyteorder("<"))
    assert bytes(wire.payload) == little_endian.tobytes()


def test_dlpack_alone_is_enough() -> None:
    array = np.arange(3, dtype=np.float32)
    assert bytes(to_wire(OnlyDlpack(array)).payload) == array.tobytes()


@pytest.mark.parametrize(
    ("dtype", "mends"),
    [
        ("object", r'np\.array\(values, dtype="float32"\)'),
        ("U3", r"array\.tolist\(\)"),
        ("S3", r"array\.tolist\(\)"),
        ("uint16", r'array\.astype\("int32"\)'),
        ("uint32", r'array\.astype\("int64"\)'),
        ("datetime64[s]", r'array\.astype\("int64"\)'),
        ("timedelta64[s]", r'array\.astype\("int64"\)'),
        ("longdouble", r'array\.astype\("float64"\)'),
        ([("a", "f4"), ("b", "f4")], "structured_to_unstructured"),
    ],
)
def test_other_dtypes_are_refused_with_the_line_that_mends_them(dtype: Any, mends: str) -> None:
    with pytest.raises(TypeError, match=f"cannot be sent: .*{mends}"):
        to_wire(np.zeros(2, dtype))


@pytest.mark.parametrize("mask", [False, [True, False]])
def test_masked_arrays_are_refused_with_the_line_that_mends_them(mask: Any) -> None:
    with pytest.raises(TypeError, match=r"masked .*`array\.filled\(0\)`"):
        to_wire(np.ma.MaskedArray([1.0, 2.0], mask))


def test_what_numpy_cannot_read_through_dlpack_is_refused() -> None:
    class Odd:
        tensor = torch.zeros(2, dtype=torch.bfloat16)

        def __dlpack__(self, **options: Any) -> Any:  # on the class: NumPy 1.26 looks for it there
            return self.tensor.__dlpack__(**options)

        def __dlpack_device__(self) -> Any:
            return self.tensor.__dlpack_device__()

    with pytest.raises(TypeError, match=r"Odd through DLPack .* as float32 where it is bfloat16"):
        to_wire(Odd())


def test_bfloat16_widens_to_float32_exactly() -> None:
    tensor = torch.randn(3, 4).bfloat16()
    np.testing.assert_array_equal(float_array(tensor), tensor.float().numpy())


def test_more_than_eight_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match="9 dimensions"):
        to_wire(np.zeros((1,) * 9, np.float32))


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
@pytest.mark.parametrize(
    "made",
    [
        trocar.edit("layer3", "steer", np.arange(4, dtype=np.float32), alpha=2),
        trocar.edit("layer3", "zero", mask=np.eye(3, dtype=bool)),
        trocar.tap("layer3", reduce=trocar.pca(np.eye(3), np.ones(3))),
        trocar.logit(3) - 0.5 * trocar.loss("cross_entropy", np.array([3, 5])) + 1,
    ],
)
def test_what_holds_arrays_can_be_copied_and_pickled(made: Sends, again: Callable[[Sends], Sends]) -> None:
    found = again(made)
    assert found == made
    assert found.to_wire() == made.to_wire()
    assert [bytes(payload) for payload in found.payloads()] == [bytes(p) for p in made.payloads()]
