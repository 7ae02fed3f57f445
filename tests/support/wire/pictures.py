"""Images as a client has them, and images that only pretend."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def photo(height: int = 250, width: int = 300, seed: int = 0) -> Image.Image:
    """Return a smooth image with all three channels in use."""
    small = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str, **options: int | bool) -> bytes:
    """Encode as PNG, JPEG or WebP."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def colour_count(picture: Image.Image) -> int:
    """Return how many colours a picture has."""
    pixels = np.asarray(picture.convert("RGBA"))
    return len(np.unique(pixels.view(np.uint32)))


def png_bomb(width: int, height: int) -> bytes:
    """Return a PNG of a few hundred bytes whose header promises this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1000))
    parts = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(name, data) for name, data in parts)


def jpeg_bomb(width: int, height: int) -> bytes:
    """Return a small JPEG whose header promises this size."""
    data = bytearray(encoded(photo(16, 16), "JPEG"))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def jpeg_scans(width: int, height: int, count: int) -> bytes:
    """Return a progressive JPEG of one colour with so many scans over all its pixels."""
    data = encoded(Image.new("RGB", (width, height), "teal"), "JPEG", progressive=True)
    # The last scan again and again: a bit that is refined twice is no error to libjpeg.
    last = data[data.rindex(b"\xff\xda") : -2]
    return data[:-2] + last * (count - data.count(b"\xff\xda")) + data[-2:]


def webp_bomb(width: int, height: int) -> bytes:
    """Return a small WebP whose header promises this size, at most 16383 a side."""
    data = bytearray(encoded(photo(16, 16), "WEBP"))
    frame = data.index(b"\x9d\x01\x2a")
    data[frame + 3 : frame + 7] = struct.pack("<HH", width, height)
    return bytes(data)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
