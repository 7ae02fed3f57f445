"""Tests that only the whole run has (`make test-all`): they take a minute, or processes of their own.

`make test` leaves them out by the marker `whole`, so that it ends within the time in which people wait. CI
has them. One test of another file gets the marker itself.
"""

from __future__ import annotations

import pytest

FILES = {
    "tests/deploy/test_read_only.py": "a server in a mount namespace of its own",
    "tests/integration/client/test_demo.py": "the demo, as `make demo` shows it",
    "tests/integration/client/test_demo_text.py": "the demo of texts",
    "tests/integration/client/test_docs.py": "the code of the guides",
    "tests/integration/client/test_notebooks.py": "notebooks",
    "tests/integration/client/test_page": "the page in a browser",
    "tests/integration/cluster": "processes of Ray",
    "tests/reliability": "kills, storms and bombs, by the hundred",
    "tests/unit/benchmarks": "benchmarks in processes of their own",
}
"""Files, folders and beginnings of their paths, each with what takes its time."""


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests of these files."""
    for item in items:
        if item.nodeid.startswith(tuple(FILES)):
            item.add_marker("whole")
