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
    assert origins.refusal("POST", headers) is None


CLICKED = {
    b"host": b"127.0.0.1:8080",
    b"sec-fetch-site": b"cross-site",
    b"sec-fetch-mode": b"navigate",
    b"sec-fetch-dest": b"document",
}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("site", [b"cross-site", b"same-site"])
def test_a_link_on_another_site_opens_the_page(method: str, site: bytes) -> None:
    assert LOOPBACK.refusal(method, {**CLICKED, b"sec-fetch-site": site}) is None


@pytest.mark.parametrize(
    ("method", "other"),
    [
        ("POST", {}),
        ("GET", {b"host": b"attacker.example:8080"}),
        ("GET", {b"origin": b"http://attacker.example"}),
        ("GET", {b"sec-fetch-dest": b"iframe"}),
        ("GET", {b"sec-fetch-dest": b"image", b"sec-fetch-mode": b"no-cors"}),
        ("GET", {b"sec-fetch-mode": b"cors"}),
    ],
)
def test_another_site_does_nothing_but_open_the_page(method: str, other: dict[bytes, bytes]) -> None:
    assert LOOPBACK.refusal(method, {**CLICKED, **other})


@pytest.mark.parametrize(
    ("given", "in_a_browser"),
    [("2001:DB8::5", "2001:db8::5"), ("fe80:0:0:0:0:0:0:1", "fe80::1"), ("0:0:0:0:0:0:0:1", "::1")],
)
def test_an_ipv6_address_has_the_name_that_browsers_send(given: str, in_a_browser: str) -> None:
    assert Origins.at(given, 8080).refusal("GET", {b"host": f"[{in_a_browser}]:8080".encode()}) is None


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
    assert LOOPBACK.refusal("GET", headers)


def test_an_address_of_the_network_has_that_name_only() -> None:
    assert OPEN.refusal("GET", {b"host": b"localhost:443"})
    assert "https://10.0.0.7" in str(OPEN.refusal("GET", {b"host": b"attacker.example"}))
