"""Ports of the page that cannot be opened: plain words instead of the system's."""

import errno
import socket

import pytest

from trocar._page.serving import PageAddress, listen


def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} of 127.0.0.1 is in use; choose another") as caught:
            listen(PageAddress("127.0.0.1", port))
    assert caught.value.errno == errno.EADDRINUSE


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "192.0.2.1 is not an address of this machine"),
        ("no-such-host.invalid", "no host is called 'no-such-host.invalid'"),
    ],
)
def test_a_host_that_is_not_this_machine_is_told(host: str, words: str) -> None:
    with pytest.raises(OSError, match=words):
        listen(PageAddress(host, 0, insecure=True))
