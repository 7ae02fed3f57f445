"""Which versions of client and server go together."""

import pytest

from trocar_api.versions import is_understood, parse_version


@pytest.mark.parametrize(
    ("client", "server", "expected"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.9", "0.1.0", True),
        ("0.1.0", "0.2.0", True),
        ("0.2.0", "0.1.9", False),
        ("1.0.0", "0.9.0", False),
        ("0.9.0", "1.0.0", False),
        ("1.2.0.dev1+abc", "1.2.0", True),
        ("10.0.0", "9.0.0", False),
        ("", "0.1.0", True),
        ("nonsense", "0.1.0", True),
        ("0.1.0", "unknown", True),
    ],
)
def test_a_server_understands_its_own_minor_version_and_earlier_ones(
    client: str, server: str, expected: bool
) -> None:
    assert is_understood(client, server) is expected


@pytest.mark.parametrize(
    "text", ["", "1", "v1.2", "1.2\n", "1.2;drop", "9" * 70 + ".1", "\u0661.\u0662", "-1.2"]
)
def test_what_is_no_version_is_none(text: str) -> None:
    assert parse_version(text) is None
