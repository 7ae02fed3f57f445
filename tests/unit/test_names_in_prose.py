"""Names in documentation: modules of ours in backticks exist, and so does every note that is cited."""

import re

from tests.support import ROOT

_SOURCES = {
    path.relative_to(ROOT / folder).with_suffix("").as_posix(): path.read_text()
    for folder in ("service", "client", "proto")
    for path in (ROOT / folder).rglob("*.py")
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
}
_PAGES = {
    path.name: path.read_text()
    for folder in ("", "docs", "docs/tasks")
    for path in (ROOT / folder).glob("*.md")
    if path.name != "CHANGELOG.md"  # which names what is gone
}
_MODULE = re.compile(r"`(trocar_(?:server|api)(?:\.[a-z_]+)+)(?:\.[A-Z]\w*)*`")
_CITATION = re.compile(r"\bNote: \[([^\]]+)\]")
_TITLE = re.compile(r"^ *(?:# )?Note: \[([^\]]+)\]$", re.MULTILINE)


def _is_known(name: str) -> bool:
    """Whether a dotted name is a module or package, or a name in one."""
    path = name.replace(".", "/")
    if path in _SOURCES or f"{path}/__init__" in _SOURCES:
        return True
    module, _, last = path.rpartition("/")
    return last in _SOURCES.get(module, _SOURCES.get(f"{module}/__init__", ""))


def test_modules_in_backticks_exist() -> None:
    named = {(page, name) for page, text in (_PAGES | _SOURCES).items() for name in _MODULE.findall(text)}
    assert sorted((page, name) for page, name in named if not _is_known(name)) == []


def test_cited_notes_exist() -> None:
    titles = {title for text in _SOURCES.values() for title in _TITLE.findall(text)}
    cited = {title for text in _SOURCES.values() for title in _CITATION.findall(text)}
    assert titles
    assert sorted(cited - titles) == []
