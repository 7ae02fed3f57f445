"""Multi-server targets: `gpu1:50051,gpu2:50051` or `ipv4:10.0.0.1:50051,10.0.0.2:50051`."""

import re
import socket

DEFAULT_PORT = 50051
"""Where none is written."""
DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"

_SCHEMES = ("ipv4:", "ipv6:")
_AS_THEY_ARE = ("unix:", "unix-abstract:", "vsock:", "xds:", "passthrough:", "google-c2p:")
"""gRPC's other kinds of targets."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)


def with_default_port(target: str) -> tuple[str, bool | None]:
    """Return an address with a port, and whether it says TLS; None where it does not say.

    `gpu1` is `gpu1:50051`; so are `http://gpu1`, which says plain text, and `https://gpu1`, which says TLS.

    Raises:
        TypeError: It is not a text.
        ValueError: It is no address; the message says what to write.
    """
    if not isinstance(target, str):
        raise TypeError(f"the address of the server is {target!r}; write a text, for example 'gpu1:50051'")
    target = target.strip()
    if not target:
        raise ValueError("the address of the server is empty; write host:port")
    if target == "local" or target.startswith(_AS_THEY_ARE):
        return target, None
    if target.startswith(("/", "./", "~")):
        raise ValueError(f"{target!r} is a path; for a Unix socket write unix:{target}")
    if target.startswith("dns:"):
        head, slash, name = target.rpartition("/")
        return (head + slash + _with_port(name) if slash else f"dns:{_with_port(target[4:])}"), None
    if match := _URL.fullmatch(target):
        return _of_url(match[1].lower(), match[2], target)
    scheme = next((known for known in _SCHEMES if target.startswith(known)), "")
    parts = target.removeprefix(scheme).split(",")
    return scheme + ",".join(_with_port(part.strip()) for part in parts), None


def _of_url(scheme: str, rest: str, target: str) -> tuple[str, bool]:
    if scheme not in ("http", "https", "grpc", "grpcs"):
        raise ValueError(
            f"{target!r}: {scheme}:// is not the address of a server; write host:port, or https://host:port"
        )
    address = rest.rstrip("/")
    if not address or any(sign in address for sign in "/?#@"):
        raise ValueError(f"{target!r}: a server has no path and no user name; write {scheme}://host:port")
    return ",".join(_with_port(part.strip()) for part in address.split(",")), scheme in ("https", "grpcs")


def _with_port(address: str) -> str:
    if not address:
        raise ValueError("one of the addresses is empty; write host:port,host:port")
    if address.startswith("[") or address.count(":") < 2:
        host, colon, port = address.rpartition(":")
        if not colon or address.endswith("]"):
            return f"{address}:{DEFAULT_PORT}"
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(
                f"{address!r}: {port!r} is not a port, 1 to 65535; write for example {DEFAULT_TARGET}"
            )
        return address
    return f"[{address}]:{DEFAULT_PORT}"  # an IPv6 address without brackets


def addresses_of(target: str) -> tuple[str, ...]:
    """Return a target for each server that a target lists; none if it is a single server or a name.

    Raises:
        ValueError: One of the addresses is empty.
    """
    scheme = next((known for known in _SCHEMES if target.startswith(known)), "")
    parts = [part.strip() for part in target.removeprefix(scheme).split(",")]
    if len(parts) == 1 or target.startswith(("unix:", "unix-abstract:", "dns:")):
        return ()
    if not all(parts):
        raise ValueError(f"one of the addresses in {target!r} is empty; write host:port,host:port")
    return tuple(f"{scheme}{part}" for part in parts)


def listed_target(addresses: tuple[str, ...]) -> str:
    """Return the one gRPC target that lists all servers; host names are looked up now.

    gRPC itself takes lists of IP addresses only.

    Raises:
        ValueError: A name cannot be looked up, or IPv4 and IPv6 are mixed.
    """
    if addresses[0].startswith(_SCHEMES):
        scheme = addresses[0].partition(":")[0]
        return f"{scheme}:{','.join(address.partition(':')[2] for address in addresses)}"
    outcome = [_looked_up(address) for address in addresses]
    families = {family for family, _ in outcome}
    if len(families) > 1:
        raise ValueError("the addresses of the servers mix IPv4 and IPv6; use one of them for all")
    return f"{families.pop()}:{','.join(address for _, address in outcome)}"


def host_of(address: str) -> str:
    """Return the host of `host:port`, for the name in its certificate."""
    bare = address.removeprefix("ipv4:").removeprefix("ipv6:")
    return bare[1:].partition("]")[0] if bare.startswith("[") else bare.rpartition(":")[0] or bare


def certificate_host(addresses: tuple[str, ...]) -> str:
    """Return the host whose name the certificate of a server, or of every listed one, has."""
    return host_of(addresses[0].removeprefix("dns:").rpartition("/")[2])


def _looked_up(address: str) -> tuple[str, str]:
    host, port = host_of(address), address.rpartition(":")[2]
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"cannot resolve the server {address!r}: {error.strerror or error}") from None
    results.sort(key=lambda result: result[0] != socket.AF_INET)  # IPv4 if there are both
    family, *_, outcome = results[0]
    number = str(outcome[0])
    if family == socket.AF_INET:
        return "ipv4", f"{number}:{port}"
    return "ipv6", f"[{number}]:{port}"
