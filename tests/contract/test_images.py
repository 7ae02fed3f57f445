"""A picture is the same whoever decodes it: the server, or the client that is given a PIL image."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.support.wire.pictures import encoded, photo
from trocar._attribution.image_pixels import image_pixels
from trocar._base.rgb import rgb_pixels
from trocar._export.decoding import as_value, client_decoder, keep_encoded
from trocar._uploads.object_shards import _encoded
from trocar_server.decoding.pixels import decode_image

LIMIT = 50_000_000


def turned(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    photo(30, 40).save(file, kind, exif=exif)
    return file.getvalue()


def grey_16() -> Image.Image:
    return Image.fromarray(np.arange(0, 1 << 16, 37, dtype=np.uint16)[:1600].reshape(40, 40))


PICTURES = {
    **{f"{kind} {turn}": turned(turn, kind) for kind in ("JPEG", "PNG", "WEBP") for turn in range(1, 9)},
    "16 bits": encoded(grey_16(), "PNG"),
    **{mode: encoded(photo(30, 40).convert(mode), "PNG") for mode in ("L", "P", "1", "RGBA", "LA")},
    "CMYK": encoded(photo(30, 40).convert("CMYK"), "JPEG"),
}

CLIENTS: dict[str, Callable[[bytes], Any]] = {
    "PIL image": lambda data: rgb_pixels(Image.open(io.BytesIO(data))),
    "PIL image of a data set": lambda data: as_value(Image.open(io.BytesIO(data)), keep_encoded),
    "decoded by the client": client_decoder(LIMIT),
    "PIL image of an upload": lambda data: np.asarray(
        decode_image(_encoded(Image.open(io.BytesIO(data))), LIMIT)
    ),
}


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("way", CLIENTS)
def test_client_and_server_see_the_same_pixels(picture: str, way: str) -> None:
    data = PICTURES[picture]
    assert np.array_equal(CLIENTS[way](data), np.asarray(decode_image(data, LIMIT)))


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_picture_under_a_heat_map_stands_as_the_model_saw_it(turn: int, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(turned(turn, "PNG"))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(path)).convert("RGB"))
    assert np.array_equal(image_pixels(str(path)), upright / 255)


def test_32_bits_with_values_of_16_are_scaled_like_16() -> None:
    wide = Image.fromarray(np.asarray(grey_16()).astype(np.int32))
    assert wide.mode == "I"
    assert np.array_equal(rgb_pixels(wide), rgb_pixels(grey_16()))


@pytest.mark.parametrize(
    "values",
    [np.full((4, 4), 0.5, np.float32), np.full((4, 4), 70_000, np.int32), np.full((4, 4), -1, np.int32)],
)
def test_values_without_a_range_are_refused_and_never_clipped(values: Any) -> None:
    with pytest.raises(ValueError, match="no defined value range"):
        rgb_pixels(Image.fromarray(values))
