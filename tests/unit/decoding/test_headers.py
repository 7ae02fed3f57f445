"""Headers against Pillow's own, and images that are much work for their size."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from tests.support.wire.pictures import encoded, jpeg_scans, photo
from trocar_api.reasons import ErrorReason
from trocar_server.decoding.headers import MAX_CHUNKS, MAX_ENCODED_BYTES, MAX_SCANS, read_header
from trocar_server.errors import ServiceError

LIMIT = 50_000_000


@pytest.mark.parametrize("size", [(1, 1), (40, 30), (1, 900), (1200, 7)])
@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA", "CMYK", "P"])
@pytest.mark.parametrize(
    ("format_", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("JPEG", {"comment": b"\xff\xda\xff\xc0" * 99}),
        ("PNG", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"save_all": True, "append_images": [Image.new("RGB", (40, 30))]}),
    ],
)
def test_a_header_says_what_pillow_says(
    format_: str, options: dict[str, object], mode: str, size: tuple[int, int]
) -> None:
    if (mode in ("RGBA", "P") and format_ == "JPEG") or (mode == "CMYK" and format_ != "JPEG"):
        mode = "RGB"
    if "append_images" in options:
        size = (40, 30)
    file = io.BytesIO()
    photo(size[1], size[0]).convert(mode).save(file, format_, **options)
    header = read_header(file.getvalue(), LIMIT)
    assert (header.format, header.width, header.height) == (format_, *size)


def scans_of(data: bytes) -> int:
    return read_header(data, LIMIT).scan_count


def test_scans_of_usual_images_are_counted() -> None:
    assert scans_of(encoded(photo(), "JPEG")) == 1
    assert 6 <= scans_of(encoded(photo(), "JPEG", progressive=True)) <= 12


@pytest.mark.parametrize("count", [MAX_SCANS + 1, 1_000, 10_000])
def test_many_scans_are_refused_with_their_number(count: int) -> None:
    data = jpeg_scans(64, 48, count)
    with pytest.raises(ServiceError, match=f"has {count:,} scans") as caught:
        read_header(data, LIMIT)
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE


def test_as_many_scans_as_are_allowed_are_taken() -> None:
    assert scans_of(jpeg_scans(64, 48, MAX_SCANS)) == MAX_SCANS


def test_scans_over_many_pixels_may_be_fewer() -> None:
    with pytest.raises(ServiceError, match="has 40 scans over 4000 x 4000 pixels"):
        read_header(jpeg_scans(4000, 4000, 40), LIMIT)


def test_what_looks_like_scans_in_a_segment_is_none() -> None:
    """A thumbnail, say: it is never decoded."""
    file = io.BytesIO()
    photo().save(file, "JPEG")
    data = file.getvalue()
    frame = data.index(b"\xff\xda")
    segment = b"\xff\xfe" + struct.pack(">H", 2 + 2 * 500) + b"\xff\xda" * 500
    assert scans_of(data[:frame] + segment + data[frame:]) == 1


def test_a_scan_behind_filling_bytes_is_counted() -> None:
    data = jpeg_scans(64, 48, 200).replace(b"\xff\xda", b"\xff\xff\xff\xda")
    with pytest.raises(ServiceError, match="has 200 scans"):
        read_header(data, LIMIT)


def test_scans_that_begin_at_the_edge_of_a_search_window_are_counted() -> None:
    one = jpeg_scans(64, 48, 150)
    for shift in range(70):
        comment = b"\xff\xfe" + struct.pack(">H", 2 + 60_000 + shift) + bytes(60_000 + shift)
        with pytest.raises(ServiceError, match="has 150 scans"):
            read_header(one[:2] + comment + one[2:], LIMIT)


def test_many_chunks_of_a_png_image_are_refused() -> None:
    data = encoded(photo(), "PNG")
    empty = struct.pack(">I", 0) + b"teSt" + struct.pack(">I", zlib.crc32(b"teSt"))
    with pytest.raises(ServiceError, match="chunks") as caught:
        read_header(data[:33] + empty * MAX_CHUNKS + data[33:], LIMIT)
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE


def test_too_many_encoded_bytes_are_refused() -> None:
    with pytest.raises(ServiceError) as caught:
        read_header(encoded(photo(), "PNG") + bytes(MAX_ENCODED_BYTES), LIMIT)
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE


@pytest.mark.parametrize("length", range(8))
def test_a_frame_that_is_shorter_than_its_numbers_is_damaged(length: int) -> None:
    """Whole images with such a frame are left to the decoder, which refuses them, too."""
    data = b"\xff\xd8\xff\xc0" + struct.pack(">H", length) + b"\x08\x00\x10\x00\x10"
    with pytest.raises(ServiceError) as caught:
        read_header(data, LIMIT)
    assert caught.value.reason is ErrorReason.INVALID_IMAGE
    with pytest.raises(UnidentifiedImageError):
        Image.open(io.BytesIO(data))


@pytest.mark.parametrize("format_", ["JPEG", "PNG", "WEBP"])
def test_mutated_headers_are_read_or_refused(format_: str) -> None:
    data, random = encoded(photo(), format_), np.random.default_rng(3)
    for _ in range(2_000):
        mutated = bytearray(data[: random.integers(0, len(data))])
        for position in random.integers(0, max(1, min(60, len(mutated))), 3):
            mutated[position : position + 1] = bytes([random.integers(0, 256)])
        assert outcome(bytes(mutated)) in ("read", ErrorReason.INVALID_IMAGE, ErrorReason.IMAGE_TOO_LARGE)


def outcome(data: bytes) -> str:
    try:
        header = read_header(data, LIMIT)
    except ServiceError as error:
        return error.reason
    return "read" if 0 < header.width * header.height <= LIMIT else "nonsense"
