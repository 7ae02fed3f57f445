"""MkDocs hook: adds the pages that are made of sources, and keeps links to files beside docs/ working.

Runs in .venv-docs (`make docs`), where nothing of Trocar is installed: sources are read, not imported.
"""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

from tools.notebook_pages import notebook_pages
from tools.site_pages import ROOT, api_pages, carried_paths, folder_page, site_path, with_site_links
from tools.wire_reference import wire_pages

_api = list(api_pages())
_wire = list(wire_pages())
_notebooks = list(notebook_pages())


def on_config(config: Any) -> None:
    """Fill the menu's folders of made pages; anchors are those that GitHub makes of headings."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    made = {
        "api/": [{title: f"api/{name}"} for name, title, _ in _api],
        "wire/": [{title: f"wire/{name}"} for name, title, _ in _wire],
        "notebooks/": [{page.title: site_path(page.path)} for page in _notebooks],
    }
    for section in config.nav:
        for entry in next(iter(section.values())) if isinstance(next(iter(section.values())), list) else ():
            for title, target in entry.items():
                entry[title] = made.get(target, target)


def on_files(files: Files, config: Any) -> None:
    """Add made pages, files that pages link to, and a page for each folder that they link to."""
    for folder, pages in (("api", _api), ("wire", _wire)):
        for name, _, text in pages:
            files.append(File.generated(config, f"{folder}/{name}", content=text))
    for page in _notebooks:
        files.append(File.generated(config, site_path(page.path), content=page.text))
        for name, data in page.pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=data))
        files.append(File.generated(config, f"notebooks/{page.path.name}", abs_src_path=str(page.path)))
    sources = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    for path in sorted(carried_paths(sources)):
        if path.is_dir():
            files.append(File.generated(config, site_path(path), content=folder_page(path)))
        elif not path.is_relative_to(ROOT / "docs") and path.suffix != ".ipynb":
            files.append(File.generated(config, site_path(path), abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Point links of pages from outside of docs/, and links to there, at the site's copy.

    The dated notes are not searched: they would come before the guides.
    """
    if page.file.src_uri.startswith("decisions/"):
        page.meta["search"] = {"exclude": True}
    source = page.file.abs_src_path
    return with_site_links(markdown, Path(source)) if source else markdown
