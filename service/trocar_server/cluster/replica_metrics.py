"""Metrics of all replicas of a cluster as one page of Prometheus' text format, with a label `replica`.

server = MetricsServer(replica_metrics(lambda: {"resnet50/0": "10.0.0.5:41873"}), "127.0.0.1", 9464)
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.request import ProxyHandler, build_opener

_READ_WITHIN_S = 5.0
_AT_ONCE = 16
_UP = "trocar_replica_up"
_UP_HELP = (
    f"# HELP {_UP} Whether the gateway could read the metrics of a replica\n",
    f"# TYPE {_UP} gauge\n",
)
_opener = build_opener(ProxyHandler({}))


@dataclass
class _Family:
    """The lines of one metric."""

    header: dict[str, str] = field(default_factory=dict)
    samples: list[str] = field(default_factory=list)


def replica_metrics(addresses: Callable[[], Mapping[str, str]]) -> Callable[..., Iterable[bytes]]:
    """Return a WSGI application that reads the metrics of every replica, and merges them.

    Args:
        addresses: Returns `host:port` of the metrics of each replica by its name; called on any thread.
    """

    def answer(environment: Any, start_response: Any) -> Iterable[bytes]:
        if environment["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b""]
        named = addresses()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            texts = dict(zip(named, threads.map(_read, named.values()), strict=True))
        start_response("200 OK", [("Content-Type", "text/plain; version=0.0.4; charset=utf-8")])
        return [merged(texts).encode()]

    return answer


def merged(texts: Mapping[str, str | None]) -> str:
    """Return one text of several, each in Prometheus' text format.

    Args:
        texts: Metrics by replica; None for one that does not answer.
    """
    families: dict[str, _Family] = {}
    for replica, text in texts.items():
        own = _Family()
        for line in (text or "").splitlines():
            if line.startswith(("# HELP ", "# TYPE ")):
                _, kind, name, *_ = line.split(" ", 3)
                own = families.setdefault(name, _Family())
                own.header[kind] = line
            elif line and not line.startswith("#"):
                own.samples.append(_labelled(line, replica))
    lines = [line for family in families.values() for line in (*family.header.values(), *family.samples)]
    up = [_labelled(f"{_UP} {float(text is not None)}", replica) for replica, text in texts.items()]
    return "".join(_UP_HELP) + "".join(f"{line}\n" for line in (*up, *lines))


def _labelled(sample: str, replica: str) -> str:
    """Add the label to a sample: `name{a="b"} 1` or `name 1`."""
    label = f'replica="{replica}"'  # a model id and a number: nothing to escape
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, rest = sample.partition(" ")
    return f"{name}{{{label}}} {rest}"


def _read(address: str) -> str | None:
    try:
        with _opener.open(f"http://{address}/metrics", timeout=_READ_WITHIN_S) as reply:
            return str(reply.read().decode())
    except OSError:
        return None
