"""Sizes as people write them."""

import pytest
import typer

from trocar._cli.sizes import parse_size


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
    assert parse_size(text, "--spool") == expected


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1e9", "1,5GB", "256M", "256 MiB 3", "٣MiB", "nan", "1" * 99, "0x10"]
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"--spool: .* is no size; write for example 256MiB"):
        parse_size(text, "--spool")
