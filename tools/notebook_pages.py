"""Pages of the site that show the notebooks with their stored outputs; needs nbconvert.

Code becomes blocks of the site's own theme, and pictures become files, so that a page needs no script and no
network.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.site_pages import NOTEBOOKS


@dataclass(frozen=True)
class NotebookPage:
    """A notebook as a page."""

    path: Path
    """The notebook."""
    title: str
    text: str
    """Markdown."""
    pictures: dict[str, bytes]
    """Files beside the page, by name."""


def notebook_pages() -> Iterator[NotebookPage]:
    """Yield a page for each notebook, in their order."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb"), key=notebook_number):
        yield notebook_page(path)


def notebook_number(path: Path) -> int:
    """Return the number that a notebook's name starts with: its place among all of them."""
    return int(path.stem.partition("-")[0])


def notebook_page(path: Path) -> NotebookPage:
    """Return the page of a notebook."""
    from nbconvert import MarkdownExporter  # in .venv-docs alone

    resources = {"unique_key": f"{path.stem}-pictures", "output_files_dir": f"{path.stem}-pictures"}
    text, made = MarkdownExporter().from_filename(str(path), resources)
    heading, _, rest = text.lstrip().partition("\n")
    link = f"[Download this notebook]({path.name}); its outputs were stored when it was last run."
    pictures = {Path(name).as_posix(): data for name, data in made["outputs"].items()}
    return NotebookPage(path, notebook_title(path), f"{heading}\n\n{link}\n{rest}", pictures)


def notebook_title(path: Path) -> str:
    """Return the heading of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "".join(cells[0]["source"]).partition("\n")[0].removeprefix("# ")
