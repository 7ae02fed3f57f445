"""Which tests import a file: for what is new, or runs in processes of its own."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

PACKAGES = ("service", "client", "proto")
"""Folders whose packages are imported by their own names."""


def module_of(file: str) -> str:
    """Return the name by which a file is imported."""
    parts = Path(file).with_suffix("").parts
    parts = parts[1:] if parts[0] in PACKAGES else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def importing_tests(tree: Path, file: str) -> list[str]:
    """Return the tests of a file: at its path below tests/unit, then all that import it, directly or not.

    Without any, the nearest folder of unit tests.
    """
    own = _own(file)
    direct = [str(own)] if own is not None and (tree / own).is_file() else []
    wanted, seen = {module_of(file)}, set[str]()
    while wanted - seen:
        module = (wanted - seen).pop()
        seen.add(module)
        for path, text in _sources(tree):
            if not _imports(module).search(text):
                continue
            if Path(path).name.startswith("test_"):
                direct.append(path)
            else:
                wanted.add(module_of(path))
    if not direct and own is not None:
        direct = [next(str(folder) for folder in own.parents if (tree / folder).is_dir())]
    return list(dict.fromkeys(direct))


def _own(file: str) -> Path | None:
    parts = Path(file).parts
    if parts[0] == "service":
        place = Path("tests/unit", *parts[2:])
    elif parts[0] == "client":
        place = Path("tests/unit/client", *parts[2:])
    else:
        return None
    return place.with_name(f"test_{place.name}")


def _imports(module: str) -> re.Pattern[str]:
    parent, _, name = module.rpartition(".")
    return re.compile(
        rf"^\s*(?:from {re.escape(module)} import |import {re.escape(module)}\b"
        rf"|from {re.escape(parent)} import .*\b{re.escape(name)}\b)",
        re.MULTILINE,
    )


@cache
def _sources(tree: Path) -> Sequence[tuple[str, str]]:
    """Return the tests and what they share, as text."""
    return [
        (str(path.relative_to(tree)), path.read_text(encoding="utf-8"))
        for path in sorted((tree / "tests").rglob("*.py"))
    ]
