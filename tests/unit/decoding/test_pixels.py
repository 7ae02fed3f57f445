import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.unit.models.conftest import reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.decoding import pixels
from trocar_server.decoding.headers import MAX_DECODED_BYTES
from trocar_server.decoding.pixels import Conversion, decode_image, image_from_pixels
from trocar_server.errors import ServiceError

LIMIT = 50_000_000


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30)) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(values).convert(mode)


def encode(image: Image.Image, format_: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format_, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG that claims a size and has hardly any pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(64)))


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


@pytest.mark.parametrize(
    ("mode", "format_"),
    [
        ("RGB", "JPEG"), ("L", "JPEG"), ("CMYK", "JPEG"),
        ("RGB", "PNG"), ("RGBA", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("1", "PNG"),
        ("RGB", "WEBP"), ("RGBA", "WEBP"),
    ],
)  # fmt: skip
def test_an_image_is_what_pillow_makes_of_it(mode: str, format_: str) -> None:
    data = encode(picture(mode), format_)
    ours = decode_image(data, LIMIT)
    assert ours.mode == "RGB"
    assert ours.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def test_transparency_of_a_palette_raises_no_warning() -> None:
    data = encode(picture("P"), "PNG", transparency=bytes(range(256)))
    assert decode_image(data, LIMIT).size == (40, 30)


def grey_16() -> Image.Image:
    """Return every value of 16 bits once."""
    return Image.fromarray(np.arange(1 << 16, dtype=np.uint16).reshape(256, 256))


def test_sixteen_bits_of_grey_are_scaled_to_eight() -> None:
    ours = np.asarray(decode_image(encode(grey_16(), "PNG"), LIMIT))
    expected = np.rint(np.arange(1 << 16) / 257).astype(np.uint8).reshape(256, 256)
    assert np.array_equal(ours, np.stack([expected] * 3, axis=-1))


def test_scaling_of_sixteen_bits_can_be_switched_off() -> None:
    data = encode(grey_16(), "PNG")
    ours = decode_image(data, LIMIT, Conversion(scale_16_bit=False))
    assert ours.tobytes() == Image.open(io.BytesIO(data)).convert("RGB").tobytes()


def turned(orientation: int, format_: str) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encode(picture(), format_, exif=exif)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(10))
def test_an_image_is_turned_as_pillow_turns_it(orientation: int, format_: str) -> None:
    data = turned(orientation, format_)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    ours = decode_image(data, LIMIT)
    assert ours.size == expected.size
    assert ours.tobytes() == expected.tobytes()


def test_turning_can_be_switched_off() -> None:
    assert decode_image(turned(6, "JPEG"), LIMIT, Conversion(orient=False)).size == (40, 30)


def test_orientation_that_nobody_can_read_turns_nothing() -> None:
    data = encode(picture(), "PNG", exif=b"Exif\0\0II*\0" + bytes(range(200)))
    assert decode_image(data, LIMIT).size == (40, 30)


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"hello", b"GIF89a" + bytes(50), b"%PDF-1.4", b"RIFF0000WAVE", b"<svg/>"]
)
def test_bytes_of_another_kind_are_no_image(data: bytes) -> None:
    with pytest.raises(ServiceError, match="not a JPEG, PNG or WebP") as error:
        decode_image(data, LIMIT)
    assert reason_of(error) is ErrorReason.INVALID_IMAGE


@pytest.mark.parametrize("format_", ["GIF", "BMP", "TIFF", "PPM", "ICO"])
def test_other_formats_are_refused_even_where_pillow_knows_them(format_: str) -> None:
    with pytest.raises(ServiceError):
        decode_image(encode(picture(), format_), LIMIT)


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("kept", [0.05, 0.5, 0.95])
def test_an_image_that_is_cut_off_is_refused(format_: str, kept: float) -> None:
    data = encode(picture(), format_)
    with pytest.raises(ServiceError) as error:
        decode_image(data[: int(len(data) * kept)], LIMIT)
    assert reason_of(error) is ErrorReason.INVALID_IMAGE
    assert "object at 0x" not in error.value.message


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_mutated_images_decode_or_are_refused(format_: str) -> None:
    data, random = encode(picture(), format_), np.random.default_rng(1)
    for _ in range(200):
        mutated = bytearray(data)
        for position in random.integers(0, len(data), 4):
            mutated[position] = random.integers(0, 256)
        assert outcome(bytes(mutated)) in ("RGB", ErrorReason.INVALID_IMAGE, ErrorReason.IMAGE_TOO_LARGE)


def outcome(data: bytes) -> str:
    try:
        return decode_image(data, 10_000).mode
    except ServiceError as error:
        return error.reason


@pytest.mark.parametrize("size", [(10_000, 10_000), (2**31 - 1, 2**31 - 1), (50_000_001, 1)])
def test_a_header_that_claims_too_many_pixels_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ServiceError, match=f"{size[0]} x {size[1]} pixels") as error:
        decode_image(png_header(*size), LIMIT)
    assert reason_of(error) is ErrorReason.IMAGE_TOO_LARGE


def test_decoded_bytes_are_limited_whatever_the_pixel_limit() -> None:
    side = int((MAX_DECODED_BYTES / 3) ** 0.5) + 1
    with pytest.raises(ServiceError) as error:
        decode_image(png_header(side, side), LIMIT)
    assert reason_of(error) is ErrorReason.IMAGE_TOO_LARGE


def test_the_pixel_limit_is_the_last_size_that_is_taken() -> None:
    data = encode(picture(), "PNG")
    assert decode_image(data, 1200).size == (40, 30)
    with pytest.raises(ServiceError):
        decode_image(data, 1199)


@pytest.mark.parametrize("lossless", [False, True])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_a_webp_image_is_measured_before_its_decoder_is_made(
    mode: str, lossless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = encode(picture(mode, (50, 31)), "WEBP", lossless=lossless)
    monkeypatch.setitem(pixels._OPENERS, "WEBP", opened := Recorder())
    with pytest.raises(ServiceError, match="50 x 31 pixels"):
        decode_image(data, 1549)
    assert opened.count == 0


class Recorder:
    """Stands for a decoder; counts how often it is made."""

    count = 0
    format = "WEBP"

    def __call__(self, file: object) -> None:
        self.count += 1


def test_a_bomb_is_refused_before_it_is_decoded() -> None:
    data = encode(Image.new("L", (9000, 9000)), "PNG")
    assert len(data) < 1 << 20
    with pytest.raises(ServiceError) as error:
        decode_image(data, LIMIT)
    assert reason_of(error) is ErrorReason.IMAGE_TOO_LARGE


def test_raw_pixels_become_the_same_image() -> None:
    image = picture()
    assert image_from_pixels(30, 40, image.tobytes()).tobytes() == image.tobytes()


@pytest.mark.parametrize(
    ("height", "width", "count"), [(2, 2, 11), (2, 2, 13), (0, 2, 0), (2, 0, 0), (-1, -4, 12)]
)
def test_pixels_that_do_not_fill_their_shape_are_refused(height: int, width: int, count: int) -> None:
    with pytest.raises(ServiceError) as error:
        image_from_pixels(height, width, bytes(count))
    assert reason_of(error) is ErrorReason.INVALID_TENSOR


def test_a_file_name_is_never_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    picture().save(path)
    with pytest.raises(ServiceError):
        decode_image(str(path).encode(), LIMIT)
