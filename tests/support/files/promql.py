"""Which metrics and labels an expression of Prometheus' query language asks for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SELECTOR = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{(?P<matchers>[^}]*)\})?\s*(?P<call>\()?")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_MATCHER = re.compile(r'([a-zA-Z_]\w*)\s*(?:=~|!~|!=|=)\s*"')
_DURATION = re.compile(r"\[[^\]]*\]")
_WORDS = frozenset(("and", "or", "unless", "bool", "offset", "sum", "min", "max", "avg", "count"))
_OF_PROMETHEUS = frozenset(("instance", "job", "le"))


@dataclass(frozen=True)
class Asked:
    """A metric, and the labels that its matchers name."""

    name: str
    labels: frozenset[str]


def asked_metrics(expression: str) -> Iterator[Asked]:
    """Yield every metric of an expression."""
    text = _DURATION.sub("", _GROUPING.sub(" ", expression))
    for found in _SELECTOR.finditer(text):
        if found["call"] or found["name"] in _WORDS or not found["name"][0].isalpha():
            continue
        yield Asked(found["name"], frozenset(_MATCHER.findall(found["matchers"] or "")) - _OF_PROMETHEUS)


def grouping_labels(expression: str) -> frozenset[str]:
    """Return the labels by which an expression groups or matches."""
    lists = (names.split(",") for names in _GROUPING.findall(expression))
    return frozenset(name.strip() for names in lists for name in names) - _OF_PROMETHEUS - {""}
