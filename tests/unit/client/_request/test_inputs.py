from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import trocar
from trocar._request.inputs import wire_inputs
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32

PIXELS = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
FLOATS = np.ones((2, 3, 4, 5), np.float32)


@pytest.mark.parametrize(
    "array", [FLOATS, FLOATS[0], np.zeros((2, 3, 4, 5), np.uint8), np.float32(3) + FLOATS]
)
def test_arrays_go_as_one_tensor(array: np.ndarray[Any, Any]) -> None:
    [argument], [payload] = wire_inputs(array)
    assert tuple(argument.tensor.shape) == array.shape
    assert bytes(payload) == array.tobytes()


def test_a_contiguous_array_is_sent_without_a_copy() -> None:
    _, [payload] = wire_inputs(FLOATS)
    assert np.shares_memory(np.frombuffer(payload, np.uint8), FLOATS)


@pytest.mark.parametrize(("pixels", "count"), [(PIXELS, 2), (PIXELS[0], 1), (torch.from_numpy(PIXELS), 2)])
def test_uint8_height_width_3_goes_as_images(pixels: Any, count: int) -> None:
    [argument], payloads = wire_inputs(pixels)
    assert [(image.raw.height, image.raw.width) for image in argument.images.images] == [(4, 5)] * count
    assert [bytes(payload) for payload in payloads] == [image.tobytes() for image in PIXELS[:count]]


def test_a_pil_image_is_as_transparent_after_it_was_an_input(tmp_path: Path) -> None:
    for mode, transparent in (("RGB", (0, 0, 0)), ("L", 0), ("P", 0)):
        Image.new(mode, (4, 4)).save(tmp_path / "one.png", transparency=transparent)
        image = Image.open(tmp_path / "one.png")
        wire_inputs(image)
        assert image.convert("RGBA").getchannel("A").getextrema() == (0, 0)


def test_pil_images_go_as_rgb_pixels() -> None:
    grey = Image.new("L", (7, 3), 9)
    [argument], [payload] = wire_inputs(grey)
    assert (argument.images.images[0].raw.height, argument.images.images[0].raw.width) == (3, 7)
    assert bytes(payload) == bytes([9] * 63)


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_go_as_the_files_bytes(tmp_path: Path, kind: Callable[[Path], Any]) -> None:
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"jpeg")
    [argument], [payload] = wire_inputs(kind(path))
    assert argument.images.images[0].encoded_byte_count == 4
    assert bytes(payload) == b"jpeg"


def test_kinds_of_images_may_be_mixed_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "cat.jpg"
    path.write_bytes(b"jpeg")
    mixed = [path, b"png", bytearray(b"webp"), Image.new("RGB", (2, 1)), PIXELS[0]]
    [argument], payloads = wire_inputs(mixed)
    assert [image.WhichOneof("form") for image in argument.images.images] == [
        *["encoded_byte_count"] * 3,
        *["raw"] * 2,
    ]
    assert [payload.nbytes for payload in payloads] == [4, 3, 4, 6, 60]


def test_a_tuple_of_images_is_a_batch_too() -> None:
    [argument], _ = wire_inputs((b"a", b"b"))
    assert len(argument.images.images) == 2


def test_a_list_of_equal_arrays_is_stacked_to_a_batch() -> None:
    [argument], [payload] = wire_inputs([FLOATS[0], torch.zeros(3, 4, 5)])
    assert list(argument.tensor.shape) == [2, 3, 4, 5]
    assert bytes(payload) == FLOATS[0].tobytes() + bytes(240)


def test_a_list_of_arrays_of_different_sizes_stays_a_list() -> None:
    arrays = [FLOATS[0], np.zeros((3, 2, 7), np.float32)]
    [argument], payloads = wire_inputs(arrays)
    assert [tuple(spec.shape) for spec in argument.tensors.tensors] == [(3, 4, 5), (3, 2, 7)]
    assert [bytes(payload) for payload in payloads] == [array.tobytes() for array in arrays]
    [narrow], halves = wire_inputs({"images": arrays}, "float16")
    assert (narrow.name, narrow.convert_to) == ("images", DTYPE_FLOAT32)
    assert [payload.nbytes for payload in halves] == [array.size * 2 for array in arrays]


@pytest.mark.parametrize("width", [4, 5])
def test_lists_of_bfloat16_keep_their_bits(width: int) -> None:
    tensors = [torch.randn(2, 4).bfloat16(), torch.randn(2, width).bfloat16()]
    _, payloads = wire_inputs(tensors)
    bits = b"".join(tensor.view(torch.int16).numpy().tobytes() for tensor in tensors)
    assert b"".join(map(bytes, payloads)) == bits


def test_arrays_of_one_list_must_have_one_dtype() -> None:
    with pytest.raises(
        TypeError, match=r"not float32, uint8; .*array\.astype\(\"float32\"\) for array in arrays"
    ):
        wire_inputs([FLOATS[0], np.zeros((3, 4, 5), np.uint8)])


def test_an_error_names_few_of_many_shapes() -> None:
    with pytest.raises(ValueError, match="and 15 more") as caught:
        wire_inputs([np.zeros((1,) * (1 + index % 7) + (index,), np.float32) for index in range(20)])
    assert len(str(caught.value)) < 400


def test_a_tuple_of_arrays_is_positional_arguments() -> None:
    arguments, payloads = wire_inputs((FLOATS, torch.arange(3)))
    assert [(argument.name, len(argument.tensor.shape)) for argument in arguments] == [("", 4), ("", 1)]
    assert len(payloads) == 2


def test_a_dict_is_keyword_arguments() -> None:
    arguments, _ = wire_inputs({"x": FLOATS, "image": [b"jpeg"]})
    assert [argument.name for argument in arguments] == ["x", "image"]
    assert [argument.WhichOneof("value") for argument in arguments] == ["tensor", "images"]


@pytest.mark.parametrize("empty", [[], {}, (), np.zeros((0, 4, 5, 3), np.uint8), {"x": []}])
def test_nothing_is_an_empty_batch(empty: Any) -> None:
    with pytest.raises(trocar.errors.EmptyBatchError):
        wire_inputs(empty)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jpg"):
        wire_inputs("nowhere.jpg")


@pytest.mark.parametrize("wrong", [3.5, [1.0, 2.0], [FLOATS, "cat.jpg"], [FLOATS, Image.new("L", (2, 2))]])
def test_what_cannot_be_sent_is_refused_with_what_can(wrong: Any) -> None:
    with pytest.raises(TypeError):
        wire_inputs(wrong)


def test_arrays_of_one_list_must_have_one_shape() -> None:
    with pytest.raises(ValueError, match="one shape"):
        wire_inputs([FLOATS, FLOATS[0]])
