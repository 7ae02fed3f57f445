"""Headers of encoded images, read without a decoder: format, size, scans. Thread-safe.

The bytes are untrusted, so every loop here has a bound that does not depend on them, and each search covers
one window at a time: other threads run in between.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_DECODED_BYTES = 64 << 20
"""The most bytes that one decoded image may have, whatever the pixel limit says."""
MAX_ENCODED_BYTES = 2 * MAX_DECODED_BYTES + (4 << 20)
"""The most bytes of one encoded image: 16 bits for each value, and something beside."""
MAX_SCANS = 100
"""Scans of one JPEG image. Usual progressive ones have about ten; each processes all pixels again."""
MAX_SCANNED_PIXELS = 512 << 20
"""Pixels times scans of one JPEG image: about eight seconds of decoding."""
MAX_CHUNKS = 65_536
"""Of one PNG image, and segments of one JPEG image."""

_WINDOW_BYTES = 64 << 10
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_AFTER_DATA = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_START_OF_SCAN = re.compile(rb"\xff\xda")
_FRAMES = frozenset((*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)))
_BARE = frozenset((0x01, *range(0xD0, 0xD9)))
_SOS, _EOI = 0xDA, 0xD9


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """Header of an encoded image."""

    format: str
    """`JPEG`, `PNG` or `WEBP`."""
    width: int
    """In pixels, as stored."""
    height: int
    """In pixels, as stored."""
    band_count: int = 3
    """Values per pixel, if the header states them."""
    scan_count: int = 1
    """Number of passes of the decoder over all pixels, or an upper bound."""

    @property
    def scanned_pixels(self) -> int:
        """Decoding work, as pixels times scans."""
        return self.width * self.height * self.scan_count


def read_header(data: bytes, max_pixels: int) -> ImageHeader:
    """Read an image's header. The format is detected by content, never by name.

    Raises:
        ServiceError: `INVALID_IMAGE`, the bytes are no JPEG, PNG or WebP image or have no header;
            `IMAGE_TOO_LARGE`, it has too many pixels, bytes, scans or chunks.
    """
    if len(data) > MAX_ENCODED_BYTES:
        raise _too_large(f"the image has {len(data):,} bytes encoded, the limit is {MAX_ENCODED_BYTES:,}")
    if data.startswith(b"\xff\xd8\xff"):
        header, position = _jpeg(data)
        check_size(header.width, header.height, header.band_count, max_pixels)
        return _with_scans(header, data, position)
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        header = _png(data)
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        header = ImageHeader("WEBP", *_webp_size(data))
    else:
        raise ServiceError(
            ErrorReason.INVALID_IMAGE,
            f"the {len(data)} bytes are not a JPEG, PNG or WebP image; convert it to one of these, or "
            "send an "
            "array",
        )
    check_size(header.width, header.height, header.band_count, max_pixels)
    if not (header.width and header.height):
        raise damaged(header.format)
    if header.format == "PNG":
        _check_chunks(data)
    return header


def check_size(width: int, height: int, band_count: int, max_pixels: int) -> None:
    """Refuse an image with too many pixels.

    Raises:
        ServiceError: `IMAGE_TOO_LARGE`.
    """
    decoded_bytes = width * height * max(3, band_count)
    if width * height > max_pixels or decoded_bytes > MAX_DECODED_BYTES:
        raise _too_large(
            f"the image has {width} x {height} pixels, {decoded_bytes} bytes decoded; the limits are "
            f"{max_pixels} pixels and {MAX_DECODED_BYTES} bytes: make it smaller before sending"
        )


def damaged(format_: str) -> ServiceError:
    """Build the error for an image that does not decode."""
    return ServiceError(
        ErrorReason.INVALID_IMAGE, f"the {format_} image does not decode; it is damaged or cut off"
    )


def _jpeg(data: bytes) -> tuple[ImageHeader, int]:
    """Return the header, and where the segments after the frame's begin."""
    for marker, start, end in islice(_segments(data, 2), MAX_CHUNKS):
        if marker in (_SOS, _EOI):
            break
        if marker in _FRAMES:
            height = int.from_bytes(data[start + 3 : start + 5])
            width = int.from_bytes(data[start + 5 : start + 7])
            if max(end, start + 8) > len(data) or not (height and width):  # its length may be a lie
                break
            return ImageHeader("JPEG", width, height, data[start + 7]), end
    raise damaged("JPEG")


def _with_scans(header: ImageHeader, data: bytes, position: int) -> ImageHeader:
    """Count the scans: at first what looks like one, and only where these are too many what is one.

    # Note: [Counting JPEG scans]
    In the data of a scan a byte 0xff is followed by 0, so what looks like the start of a scan is one, or it
    lies in a segment, such as a thumbnail. All of them are never fewer than the scans that a decoder finds.
    """
    pixels = header.width * header.height
    most = max(1, min(MAX_SCANS, MAX_SCANNED_PIXELS // pixels))
    count = sum(1 for _ in islice(_matches(_START_OF_SCAN, data, position), most + 1))
    if count > most:
        scans = (None for marker, _, _ in islice(_segments(data, position), MAX_CHUNKS) if marker == _SOS)
        count = sum(1 for _ in islice(scans, most + 1))
    if count > most:
        count = sum(1 for _ in islice(_matches(_START_OF_SCAN, data, position), MAX_CHUNKS))
        raise _too_large(
            f"the JPEG image has {count:,} scans over {header.width} x {header.height} pixels; the limits "
            f"are {MAX_SCANS} scans and {MAX_SCANNED_PIXELS:,} pixels times scans: save it with fewer, or "
            "not progressive"
        )
    return ImageHeader("JPEG", header.width, header.height, header.band_count, max(1, count))


def _segments(data: bytes, position: int) -> Iterator[tuple[int, int, int]]:
    """Yield the marker of each segment, where it begins behind the marker, and where it ends.

    The data of a scan, and other bytes between segments, are skipped as libjpeg does.
    """
    pattern = _MARKER
    while True:
        result = next(_matches(pattern, data, position), None)
        if result is None:
            return
        marker, start = data[result + 1], result + 2
        if marker in _BARE or marker == _EOI:
            end = start
        else:
            end = start + max(2, int.from_bytes(data[start : start + 2]))
        yield marker, start, end
        if marker == _EOI:
            return
        pattern = _MARKER_AFTER_DATA
        position = end


def _matches(pattern: re.Pattern[bytes], data: bytes, position: int) -> Iterator[int]:
    """Yield where a pattern of two bytes is found."""
    while position < len(data) - 1:
        end = min(position + _WINDOW_BYTES, len(data))
        for match in pattern.finditer(data, position, end):
            yield match.start()
            position = match.end()
        position = max(position, end - 1)


def _png(data: bytes) -> ImageHeader:
    if data[12:16] != b"IHDR" or len(data) < 33:
        raise damaged("PNG")
    bands = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(data[25])
    if bands is None:
        raise damaged("PNG")
    return ImageHeader("PNG", int.from_bytes(data[16:20]), int.from_bytes(data[20:24]), bands)


def _check_chunks(data: bytes) -> None:
    position = 8
    for _ in range(MAX_CHUNKS):
        if position >= len(data):
            return
        position += 12 + int.from_bytes(data[position : position + 4])
    raise _too_large(f"the PNG image has over {MAX_CHUNKS:,} chunks; save it again")


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read (width, height) from a WebP header; (0, 0) where Pillow will find no image either.

    Layout: developers.google.com/speed/webp/docs/riff_container and RFC 6386, section 9.1.
    """
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


def _too_large(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.IMAGE_TOO_LARGE, problem)
