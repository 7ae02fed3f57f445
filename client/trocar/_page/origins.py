"""Which pages may call the gateway: allow-lists of Host and Origin.

A browser sends whatever page is open to any address of this machine, with the caller's network rights. A page
of another site is told by its `Origin`, one that moved its name to 127.0.0.1 (DNS rebinding) by its `Host`.
Another site may link to the page: a link that is clicked opens it in a tab, and the site reads nothing of it.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_OWN_SITES = (b"same-origin", b"none")
_READING = ("GET", "HEAD")


@dataclass(frozen=True)
class Origins:
    """The names under which the page may be opened.

    Args:
        hosts: `host:port` of each, lower case; also without the port where it is the scheme's own.
        scheme: `http` or `https`.
    """

    hosts: frozenset[str]
    scheme: str = "http"

    @classmethod
    def at(cls, host: str, port: int, *, scheme: str = "http") -> "Origins":
        """Return the names of an address: itself, and every name of the loopback address if it is one."""
        own = _host_name(host)
        names = _LOOPBACK if own in _LOOPBACK else (own,)
        hosts = {f"{name}:{port}" for name in names}
        # Browsers leave out the port that a scheme implies.
        hosts.update(names if port == _DEFAULT_PORTS[scheme] else ())
        return cls(frozenset(hosts), scheme)

    def refusal(self, method: str, headers: Mapping[bytes, bytes]) -> str | None:
        """Return why a request is refused; None if it is not."""
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if host not in self.hosts:
            return f"the page has no name {host!r}; open it at {self.url(sorted(self.hosts)[0])}"
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != self.url(host):
            return "a page of another origin may not call this one"
        is_own = headers.get(b"sec-fetch-site", b"none") in _OWN_SITES
        if not is_own and not (method in _READING and _opens_a_tab(headers)):
            return "a page of another site may not call this one"
        return None

    def url(self, host: str) -> str:
        """Return the origin of a name."""
        return f"{self.scheme}://{host}"


def _host_name(host: str) -> str:
    """Return a host as browsers write it in `Host`: IPv6 addresses are shortened, in brackets."""
    with suppress(ValueError):
        address = ip_address(host)
        return f"[{address.compressed}]" if address.version == 6 else host
    return host.lower()


def _opens_a_tab(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request shows the page as a tab's own document, as a clicked link does, not in a frame."""
    return (headers.get(b"sec-fetch-mode"), headers.get(b"sec-fetch-dest")) == (b"navigate", b"document")
