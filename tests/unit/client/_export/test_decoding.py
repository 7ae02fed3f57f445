"""What a source may give, and what is sent for it."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.wire.pictures import encoded, photo, png_bomb
from trocar._export.decoding import as_value, client_decoder, keep_encoded, load
from trocar._sources.sample import Sample
from trocar.errors import SourceError
from trocar_server.decoding.pixels import decode_image

PIXELS = 10_000_000


def test_encoded_bytes_and_files_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"content")
    for given in (b"content", bytearray(b"content"), tmp_path / "a.jpg", str(tmp_path / "a.jpg")):
        assert as_value(given, keep_encoded) == b"content"


def test_pil_image_becomes_rgb_pixels() -> None:
    grey = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    value = as_value(grey, keep_encoded)
    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(value, np.repeat(np.asarray(grey)[..., np.newaxis], 3, axis=2))


def test_tensor_becomes_an_array() -> None:
    value = as_value(torch.arange(3), keep_encoded)
    assert isinstance(value, np.ndarray)
    assert value.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (object(), "a sample is object"),
        (None, "NoneType"),
        ({"image": b""}, "dict"),
        (np.array([{}], dtype=object), "a sample: dtype object cannot be sent"),
        (np.array(["a"]), "a sample: dtype str"),
        (np.ma.MaskedArray([1.0]), r"array\.filled"),
        (np.zeros((1,) * 8), "8 dimensions"),
    ],
)
def test_what_no_model_takes_is_refused(given: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        as_value(given, keep_encoded)


def test_bfloat16_becomes_float32_exactly() -> None:
    tensor = torch.randn(5).bfloat16()
    value = as_value(tensor, keep_encoded)
    assert isinstance(value, np.ndarray)
    np.testing.assert_array_equal(value, tensor.float().numpy())


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("RGB", "JPEG"), ("RGBA", "PNG"), ("L", "PNG"), ("P", "PNG"), ("RGB", "WEBP"), ("CMYK", "JPEG")],
)
def test_client_decodes_to_the_pixels_that_the_server_would_have(mode: str, kind: str) -> None:
    data = encoded(photo(30, 40).convert(mode), kind)
    np.testing.assert_array_equal(client_decoder(PIXELS)(data), np.asarray(decode_image(data, PIXELS)))


def test_exif_orientation_is_applied() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    photo(30, 40).save(buffer, "JPEG", exif=exif)
    decoded: Any = client_decoder(PIXELS)(buffer.getvalue())
    assert decoded.shape == (40, 30, 3)


def test_client_decodes_formats_that_the_server_does_not() -> None:
    image = photo(30, 40)
    np.testing.assert_array_equal(client_decoder(PIXELS)(encoded(image, "TIFF")), np.asarray(image))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not decode"),
        (b"no image at all", "does not decode"),
        (encoded(photo(60, 60), "PNG")[:200], "does not decode"),
        (png_bomb(9000, 9000), "9000 x 9000 pixels; the limit is 10000000"),
    ],
)
def test_bad_image_is_refused_with_the_same_words_every_time(data: bytes, message: str) -> None:
    texts = []
    for _ in range(2):
        with pytest.raises(SourceError, match=message) as caught:
            client_decoder(PIXELS)(data)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_failure_to_load_is_part_of_the_result() -> None:
    def fail() -> object:
        raise RuntimeError("gone")

    loaded = load(3, Sample("k", fail, 0.5), keep_encoded)
    assert (loaded.index, loaded.key, loaded.value, str(loaded.error)) == (3, "k", None, "gone")
