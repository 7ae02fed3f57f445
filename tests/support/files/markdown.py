"""Code blocks of guide pages."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#([^)\s]*))?\)")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    text: str
    line: int
    """Where its first line is in the page, from 1."""


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    source = page.read_text(encoding="utf-8")
    return [
        Block(match[1], match[2], source.count("\n", 0, match.start(2)) + 1)
        for match in _FENCE.finditer(source)
    ]


def links(page: Path) -> list[str]:
    """Return the targets of links and pictures outside of code, without their fragments."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return [match[1] for match in _LINK.finditer(prose)]


def table_rows(page: Path) -> list[list[str]]:
    """Return the cells of every table row of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")
    ]
