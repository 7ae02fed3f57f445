"""Images that are small only until they are decoded."""

import zlib

import pytest

import trocar
from tests.support.wire.pictures import encoded, jpeg_bomb, photo, png_bomb, webp_bomb

pytestmark = pytest.mark.usefixtures("unharmed")


BOMBS = {
    f"{kind} {width} x {height}": make(width, height)
    for kind, make, sizes in (
        (
            "PNG",
            png_bomb,
            [(50_000, 50_000), (2**31 - 1, 1), (1, 2**31 - 1), (10_000, 5_001), (2**31 - 1, 2**31 - 1)],
        ),
        ("JPEG", jpeg_bomb, [(65_500, 65_500), (65_500, 800), (10_000, 5_001), (7_000, 7_000)]),
        ("WebP", webp_bomb, [(16_383, 16_383), (16_383, 3_100), (7_100, 7_100)]),
    )
    for width, height in sizes
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_an_image_bomb_is_refused(healthy: trocar.Client, bomb: str) -> None:
    with pytest.raises((trocar.errors.ImageTooLargeError, trocar.errors.InvalidImageError)):
        healthy.extract("resnet18", BOMBS[bomb], taps="fc")


def test_many_images_that_are_small_only_while_encoded_are_refused(healthy: trocar.Client) -> None:
    """16 of them, 6 KB each, are 192 MB of pixels under a request limit of 1 MiB; 4,096 would be 49 GB."""
    large = encoded(photo(1, 1).resize((2000, 2000)), "PNG", compress_level=9)
    assert len(large) * 16 < 1 << 20
    with pytest.raises((trocar.errors.ImageTooLargeError, trocar.errors.RequestTooLargeError)):
        healthy.extract("resnet18", [large] * 16, taps="fc")


def test_a_png_text_bomb_is_refused_or_ignored(healthy: trocar.Client) -> None:
    data = encoded(photo(8, 8), "PNG")
    text = b"zTXtcomment\0\0" + zlib.compress(bytes(200 << 20), 9)
    body = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    with pytest.raises(trocar.errors.InvalidImageError):
        healthy.extract("resnet18", data[:33] + body + data[33:], taps="fc")
