"""Sizes as people write them."""

import numpy as np
import pytest

from trocar_api.byte_sizes import byte_count


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7B", 7),
        ("256MiB", 256 << 20),
        ("256 mib", 256 << 20),
        (" 1.5GB ", 1_500_000_000),
        ("0.5KiB", 512),
        ("2kb", 2000),
        ("1TiB", 1 << 40),
    ],
)
def test_a_size_is_read(text: str, expected: int) -> None:
    assert byte_count(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "1,5GB", "256M", "256 MiB 3", "٣MiB", "nan", "1" * 99, "0x10"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"budget: .* is not a size; write for example 256MiB"):
        byte_count(text, "budget")


@pytest.mark.parametrize("value", [True, 2.5, None, [1]])
def test_what_is_neither_number_nor_text_is_refused(value: object) -> None:
    with pytest.raises(
        TypeError, match=r"budget is .*; give a whole number of bytes, or a text such as '256MiB'"
    ):
        byte_count(value, "budget")


def test_whole_numbers_stay_as_they_are() -> None:
    assert byte_count(4096) == byte_count(np.int64(4096)) == 4096
