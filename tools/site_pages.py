"""Pages of the site that are made of sources: public Python names, files beside docs/, lists of folders.

Used by tools/mkdocs_hook.py; knows no MkDocs.
"""

import ast
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "client" / "trocar" / "__init__.py"
NOTEBOOKS = ROOT / "notebooks"

GROUPS = {
    "client": ("Client", ("_sync",)),
    "aio": ("Client for asyncio", ("aio",)),
    "requests": ("Requests", ("_request",)),
    "training": ("Training", ()),
    "results": ("Results", ("_result",)),
    "analysis": ("Analysis and attribution", ("_analysis", "_attribution")),
    "datasets": ("Data sets", ("_export", "_uploads")),
    "servers": ("Servers and models", ("_base", "_transport", "_wire")),
    "errors": ("Errors", ("errors",)),
}
"""Pages of the Python reference: title, and the packages whose names they have; longest match wins."""

MODULES = ("training", "errors")
"""Modules below `trocar` that have names of their own, on the page of their name."""

_LINK = re.compile(r"(?<=\]\()([^)#\s]+)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def public_names() -> dict[str, str]:
    """Return each name of `trocar.__all__` that is imported there, with its module below `trocar`."""
    nodes = list(ast.walk(ast.parse(PACKAGE.read_text(encoding="utf-8"))))  # also what is imported late
    modules = {
        name.asname or name.name: node.module.removeprefix("trocar.")
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("trocar.")
        for name in node.names
    }
    return {name: modules[name] for name in _listed(PACKAGE) if name in modules}


def _listed(path: Path) -> list[str]:
    """Return the `__all__` of a module."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    return next(
        ast.literal_eval(node.value)
        for node in nodes
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )


def group_of(module: str) -> str:
    """Return the page of the names of a module below `trocar`.

    Raises:
        KeyError: No page takes them.
    """
    fits = {
        prefix: group
        for group, (_, prefixes) in GROUPS.items()
        for prefix in prefixes
        if f"{module}.".startswith(f"{prefix}.")
    }
    if not fits:
        raise KeyError(f"no page of the Python reference takes the names of trocar.{module}; see GROUPS")
    return fits[max(fits, key=len)]


def api_pages() -> Iterator[tuple[str, str, str]]:
    """Yield file name, title and Markdown of every page of the Python reference."""
    names: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name, module in public_names().items():
        if group_of(module) not in MODULES:
            names[group_of(module)].append(name)
    for module in MODULES:
        own = _listed(PACKAGE.parent / f"{module}.py")
        names[module] = [f"{module}.{name}" for name in own]
    for group, (title, _) in GROUPS.items():
        result = sorted(names[group], key=lambda name: (name != "connect", name.lower()))
        blocks = [_directive(f"trocar.{name}") for name in result]
        yield f"{group}.md", title, "\n".join([f"# {title}\n", *_INTRODUCTIONS.get(group, ()), *blocks])


_INTRODUCTIONS = {
    "aio": ("`trocar.aio.connect` returns an `AsyncClient`.\n",),
    "errors": ("Reasons and what to do about them are in [Extracting](../extracting.md#errors).\n",),
}


def _directive(name: str) -> str:
    return f"::: {name}\n"


def site_path(path: Path) -> str:
    """Return where a file of the repository is in the site; a folder is a page that lists it.

    A notebook is the page that shows it.
    """
    inside = path.relative_to(ROOT)
    if path.suffix == ".ipynb":
        return inside.with_suffix(".md").as_posix()
    if inside.parts[:1] == ("docs",):
        inside = inside.relative_to("docs")
    if path.is_dir():
        return (inside / "index.md").as_posix()
    return "index.md" if inside == Path("README.md") else inside.as_posix()


def linked_paths(page: Path) -> set[Path]:
    """Return the files and folders of the repository that a page links to."""
    prose = _FENCE.sub("", page.read_text(encoding="utf-8"))
    result = {(page.parent / match[1]).resolve() for match in _LINK.finditer(prose) if "://" not in match[1]}
    return {path for path in result if path.exists() and path.is_relative_to(ROOT)}


def carried_paths(pages: list[Path]) -> set[Path]:
    """Return what pages link to that is no page of docs/: other files, and folders, which become lists.

    Pages among them are followed; the README, which the page index.md stands for, is not.
    """
    result: set[Path] = set()
    left = list(pages)
    while left:
        page = left.pop()
        new = {path for path in linked_paths(page) if path.is_dir() or not path.is_relative_to(ROOT / "docs")}
        new -= result | {ROOT / "README.md"}
        left += [path for path in new if path.suffix == ".md"]
        result |= new
    for folder in [path for path in result if path.is_dir()]:
        result |= set(files_below(folder))
    return result


def files_below(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, sorted by path; nothing that git ignores."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "."]
    result = subprocess.check_output(command, cwd=folder, text=True).split("\0")
    return [folder / name for name in sorted(set(result) - {""}) if (folder / name).is_file()]


def with_site_links(text: str, page: Path) -> str:
    """Return the Markdown of a page with links to files of the repository as links within the site."""
    at = Path(site_path(page)).parent

    def moved(match: re.Match[str]) -> str:
        target = (page.parent / match[1]).resolve()
        if "://" in match[1] or not target.exists() or not target.is_relative_to(ROOT):
            return match[1]
        return Path(os.path.relpath(site_path(target), at)).as_posix()

    return _outside_of_code(text, lambda prose: _LINK.sub(moved, prose))


def _outside_of_code(text: str, change: Callable[[str], str]) -> str:
    parts: list[str] = []
    end = 0
    for block in _FENCE.finditer(text):
        parts += [change(text[end : block.start()]), block[0]]
        end = block.end()
    return "".join([*parts, change(text[end:])])


def folder_page(folder: Path) -> str:
    """Return a page that lists the files of a folder: pages by title, dated ones last, newest first."""
    title = folder.relative_to(ROOT).as_posix().removeprefix("docs/")
    files = files_below(folder)
    if all(path.suffix == ".md" for path in files):
        files.sort(key=lambda path: path.stem, reverse=True)
        files.sort(key=_is_dated)
    lines = [f"- [{_title(path, folder)}]({path.relative_to(folder).as_posix()})" for path in files]
    return "\n".join([f"# {title.capitalize()}\n", *lines, ""])


def _title(path: Path, folder: Path) -> str:
    if path.suffix != ".md":
        return path.relative_to(folder).as_posix()
    heading = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    return f"{path.stem[:10]}: {heading}" if _is_dated(path) else heading


def _is_dated(path: Path) -> bool:
    return path.stem[:4].isdigit()
