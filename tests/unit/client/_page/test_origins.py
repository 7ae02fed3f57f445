"""Who may call the page's gateway: names of the page, and origins."""

import pytest

from trocar._page.origins import Origins

LOOPBACK = Origins.at("127.0.0.1", 8080)
OPEN = Origins.at("10.0.0.7", 443, scheme="https")


@pytest.mark.parametrize(
    ("origins", "headers"),
    [
        (LOOPBACK, {b"host": b"127.0.0.1:8080"}),
        (LOOPBACK, {b"host": b"localhost:8080", b"origin": b"http://localhost:8080"}),
        (LOOPBACK, {b"host": b"LOCALHOST:8080", b"sec-fetch-site": b"same-origin"}),
        (LOOPBACK, {b"host": b"[::1]:8080", b"sec-fetch-site": b"none"}),
        (OPEN, {b"host": b"10.0.0.7:443", b"origin": b"https://10.0.0.7:443"}),
    ],
)
def test_own_names_are_let_in(origins: Origins, headers: dict[bytes, bytes]) -> None:
    assert origins.refusal(headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {b"host": b"127.0.0.1"},
        {b"host": b"127.0.0.1:8081"},
        {b"host": b"attacker.example:8080"},
        {b"host": b"127.0.0.1:8080.attacker.example"},
        {b"host": b"127.0.0.1:8080", b"origin": b"null"},
        {b"host": b"127.0.0.1:8080", b"origin": b"http://attacker.example"},
        {b"host": b"127.0.0.1:8080", b"origin": b"https://127.0.0.1:8080"},
        {b"host": b"127.0.0.1:8080", b"origin": b"http://localhost:8080"},
        {b"host": b"127.0.0.1:8080", b"sec-fetch-site": b"cross-site"},
        {b"host": b"127.0.0.1:8080", b"sec-fetch-site": b"same-site"},
    ],
)
def test_others_are_refused(headers: dict[bytes, bytes]) -> None:
    assert LOOPBACK.refusal(headers)


def test_an_address_of_the_network_has_that_name_only() -> None:
    assert OPEN.refusal({b"host": b"localhost:443"})
    assert "https://10.0.0.7" in str(OPEN.refusal({b"host": b"attacker.example"}))
