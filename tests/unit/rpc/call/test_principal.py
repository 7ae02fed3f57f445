"""Who calls."""

import hashlib

import pytest

from trocar_server.models import ANONYMOUS
from trocar_server.rpc.call.authorization import principal_from

TOKEN = "s3cret"


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f" BEARER  {TOKEN} "])
def test_a_token_is_known_by_its_hash(value: str) -> None:
    expected = hashlib.sha256(TOKEN.encode()).hexdigest()
    assert principal_from([("x", "y"), ("authorization", value)]) == expected


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("authorization", "")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer  ")],
        [("authorization", TOKEN)],
        [("authorization", f"Basic {TOKEN}")],
        [("authorization-bin", TOKEN.encode())],
        [("authorization", TOKEN.encode())],
        [("x-token", f"Bearer {TOKEN}")],
    ],
)
def test_who_brings_no_token_is_anonymous(metadata: list[tuple[str, str | bytes]]) -> None:
    assert principal_from(metadata) == ANONYMOUS


def test_nobody_can_name_another_principal() -> None:
    assert principal_from([("authorization", f"Bearer {ANONYMOUS}")]) != ANONYMOUS
