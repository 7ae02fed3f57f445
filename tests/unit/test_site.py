"""The site of docs/: its menu, its made pages, and links to files beside docs/."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import trocar
from tools.notebook_pages import notebook_title
from tools.site_pages import (
    GROUPS,
    NOTEBOOKS,
    ROOT,
    api_pages,
    carried_paths,
    files_below,
    folder_page,
    group_of,
    public_names,
    with_site_links,
)
from tools.wire_reference import descriptors, wire_pages

CONFIG: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def wire() -> dict[str, str]:
    return {name: text for name, _, text in wire_pages()}


def targets(entry: Any) -> list[str]:
    """Return the pages of a menu or of a part of it."""
    if isinstance(entry, str):
        return [entry]
    parts = entry.values() if isinstance(entry, dict) else entry
    return [target for part in parts for target in targets(part)]


def test_the_menu_has_every_guide_once() -> None:
    guides = {path.relative_to(DOCS).as_posix() for path in (*DOCS.glob("*.md"), *DOCS.glob("tasks/*.md"))}
    found = targets(CONFIG["nav"])
    assert len(found) == len(set(found))
    assert guides <= set(found)
    assert {name for name in found if name.endswith(".md")} - guides == {
        *("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "decisions/index.md")
    }


def test_the_site_names_nothing_on_a_network() -> None:
    assert CONFIG["theme"]["font"] is False
    scripts = [
        *CONFIG["extra"]["polyfills"],
        *CONFIG.get("extra_javascript", []),
        *CONFIG.get("extra_css", []),
    ]
    assert [name for name in scripts if not (DOCS / name).is_file()] == []


def test_every_public_name_is_on_one_page_of_the_python_reference() -> None:
    named = [
        name
        for _, _, text in api_pages()
        for name in re.findall(r"^::: trocar\.([\w.]+)$", text, re.MULTILINE)
    ]
    pages = {name for name in trocar.__all__ if name not in trocar.errors.__all__}
    pages |= {f"errors.{name}" for name in trocar.errors.__all__}
    pages |= {f"training.{name}" for name in trocar.training.__all__}
    assert sorted(named) == sorted(pages - {"__version__", "aio", "errors", "training", "ErrorReason"})
    assert all(module for module in public_names().values())


def test_a_name_without_a_page_is_an_error() -> None:
    assert group_of("_request.taps") == "requests"
    assert set(map(group_of, public_names().values())) == set(GROUPS) - {"training"}
    with pytest.raises(KeyError, match="_novel"):
        group_of("_novel.things")


def test_every_message_field_method_and_value_of_the_wire_is_in_the_reference(wire: dict[str, str]) -> None:
    for file in descriptors().file:
        page = wire[f"{Path(file.name).stem}.md"]
        for service in file.service:
            assert [method.name for method in service.method if f"### {method.name} " not in page] == []
        for message in file.message_type:
            assert f"\n## {message.name} {{ #{message.name} }}\n" in page
            assert [field.name for field in message.field if f"| `{field.name}` |" not in page] == []
        for kind in file.enum_type:
            assert [value.name for value in kind.value if f"| `{value.name}` |" not in page] == []


def test_the_wire_reference_shows_comments_types_and_labels(wire: dict[str, str]) -> None:
    page = wire["extraction.md"]
    assert "takes stream [`ExtractRequest`](extraction.md#ExtractRequest), returns stream" in page
    assert "| `model_id` | `string` | 1 | The id of a loaded model, for example `resnet18`." in page
    assert "| `taps` | repeated [`Tap`](tap.md#Tap) | 2 |" in page
    assert "| `max_chunk_bytes` | optional `int32` | 4 |" in page
    assert "One of `" in wire["edit.md"]


def test_every_field_of_the_wire_has_a_comment(wire: dict[str, str]) -> None:
    rows = [line for text in wire.values() for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) > 500
    assert [row for row in rows if row.endswith("|  |") and "_UNSPECIFIED" not in row] == []


def test_links_to_files_beside_the_guides_lead_to_their_copies() -> None:
    page = DOCS / "tasks" / "for-my-group.md"
    text = "[a](../operating.md#backup) [b](../../CHANGELOG.md) [c](https://x.org/y) [d](../decisions)"
    assert with_site_links(text, page) == (
        "[a](../operating.md#backup) [b](../CHANGELOG.md) [c](https://x.org/y) [d](../decisions/index.md)"
    )
    code = "```sh\n[a](../../CHANGELOG.md)\n```\n"
    assert with_site_links(code, page) == code
    assert with_site_links("[q](docs/quickstart.md)", ROOT / "CONTRIBUTING.md") == "[q](quickstart.md)"


def test_notebooks_are_pages_with_their_titles() -> None:
    text = "[a](../notebooks/9-generate.ipynb)"
    assert with_site_links(text, DOCS / "notebooks.md") == "[a](notebooks/9-generate.md)"
    titles = {path.name: notebook_title(path) for path in NOTEBOOKS.glob("*.ipynb")}
    assert titles["9-generate.ipynb"] == "Generating and steering text"
    assert all(titles.values())
    assert "notebooks/" in targets(CONFIG["nav"])  # the hook fills it


def test_what_pages_link_to_comes_along_and_nothing_else() -> None:
    carried = carried_paths([DOCS / "operating.md", DOCS / "index.md"])
    assert {ROOT / "SECURITY.md", ROOT / "CHANGELOG.md", ROOT / "deploy", ROOT / "Dockerfile"} <= carried
    assert ROOT / "deploy" / "compose.yaml" in carried
    assert ROOT / "README.md" not in carried
    assert not any(path.is_relative_to(ROOT / "client") for path in carried)


def test_the_list_of_decisions_has_all_of_them_newest_first() -> None:
    notes, page = files_below(DOCS / "decisions"), folder_page(DOCS / "decisions")
    listed = re.findall(r"^- \[.+\]\((.+\.md)\)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in notes)
    dates = re.findall(r"^- \[(\d{4}-\d{2}-\d{2}): .+\]\(\1.*\.md\)$", page, re.MULTILINE)
    assert dates == sorted(dates, reverse=True)
    assert 20 < len(dates) < len(listed)
    assert "2026" not in "".join(listed[: -len(dates)])
