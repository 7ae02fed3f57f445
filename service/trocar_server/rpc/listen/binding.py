"""Why an address cannot be listened on: gRPC itself says only that it failed."""

import errno
import socket

_WORDS = {
    errno.EADDRINUSE: "is another server running there?",
    errno.EADDRNOTAVAIL: "it is not an address of this machine",
    errno.EACCES: "ports below 1024 are for root; choose another",
    errno.EPERM: "this process may not use it; choose another port",
}
_OTHERWISE = "is another server running there?"


def why_not_bound(host: str, port: int) -> str:
    """Return why a server cannot listen, and what to do, by trying it with a plain socket."""
    try:
        addresses = socket.getaddrinfo(
            host.removeprefix("[").removesuffix("]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError:
        return f"no host is called '{host}'; write an address of this machine, such as 127.0.0.1"
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
        except OSError as error:
            return _WORDS.get(error.errno or 0, _OTHERWISE)
    return _OTHERWISE
