"""Targets that stand for several servers: `gpu1:50051,gpu2:50051` or `ipv4:10.0.0.1:50051,10.0.0.2:50051`."""

import socket

_SCHEMES = ("ipv4:", "ipv6:")


def addresses_of(target: str) -> tuple[str, ...]:
    """Return a target for each server that a target lists; none where it stands for one, or for a name.

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
    found = [_looked_up(address) for address in addresses]
    families = {family for family, _ in found}
    if len(families) > 1:
        raise ValueError("the addresses of the servers are of IPv4 and IPv6; write all of them in one kind")
    return f"{families.pop()}:{','.join(address for _, address in found)}"


def host_of(address: str) -> str:
    """Return the host of `host:port`, for the name in its certificate."""
    bare = address.removeprefix("ipv4:").removeprefix("ipv6:")
    return bare[1:].partition("]")[0] if bare.startswith("[") else bare.rpartition(":")[0] or bare


def _looked_up(address: str) -> tuple[str, str]:
    host, port = host_of(address), address.rpartition(":")[2]
    try:
        results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ValueError(f"there is no server {address!r}: {error.strerror or error}") from None
    results.sort(key=lambda result: result[0] != socket.AF_INET)  # IPv4 where there is both
    family, *_, found = results[0]
    number = str(found[0])
    if family == socket.AF_INET:
        return "ipv4", f"{number}:{port}"
    return "ipv6", f"[{number}]:{port}"
