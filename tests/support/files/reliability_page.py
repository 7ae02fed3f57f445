"""The register of the tests of reliability: what `docs/reliability.md` names."""

import re

from tests.support import ROOT

PAGE = ROOT / "docs" / "reliability.md"
_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def named_tests() -> list[tuple[str, str]]:
    """Return file and name of each test of the page; the name is empty where it means a whole file."""
    return [(match[1], match[2] or "") for match in _NAMED.finditer(PAGE.read_text(encoding="utf-8"))]


def is_named(file: str, name: str, cls: str, named: set[tuple[str, str]]) -> bool:
    """Whether the page names a test, its class or its file."""
    return bool(named & {(file, ""), (file, name), (file, cls)})
