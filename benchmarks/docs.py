"""Documentation tables: the last results in docs/performance.md: `python -m benchmarks.docs [RESULTS]`.

A section's tables are between `<!-- bench: serving -->` and `<!-- end of bench: serving -->`: no figure is
typed by hand.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.__main__ import RESULTS
from benchmarks.report import Section, section_from_json

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"


def read_results(file: Path) -> dict[str, Section]:
    """Return the sections of a file of results, by name."""
    result = json.loads(file.read_text(encoding="utf-8"))
    return {name: section_from_json(data) for name, data in result.items()}


def rendered(name: str, section: Section) -> str:
    """Return the tables of a section with its environment."""
    facts = [
        f"{key} {value}" if key not in ("date", "processor") else value
        for key, value in section.machine.items()
    ]
    parts = [f"Measured with `python -m benchmarks {name}`: {', '.join(facts)}."]
    for table in section.tables:
        parts += [f"**{table.title}.** {table.note}".strip(), table.markdown()]
    return "\n\n".join(parts)


def written(page: str, sections: Mapping[str, Section]) -> str:
    """Return a page with the tables of these sections in place.

    Raises:
        ValueError: The page has no place for one of them.
    """
    for name, section in sections.items():
        begin, end = f"<!-- bench: {name} -->", f"<!-- end of bench: {name} -->"
        match = re.search(f"{re.escape(begin)}\n.*?{re.escape(end)}", page, re.DOTALL)
        if match is None:
            raise ValueError(f"the page has no place for {name!r}; write {begin} and {end} into it")
        text = f"{begin}\n\n{rendered(name, section)}\n\n{end}"
        page = f"{page[: match.start()]}{text}{page[match.end() :]}"
    return page


def main() -> None:
    """Write the results into the page."""
    results = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    if not results.exists():
        sys.exit(f"there are no results in {results}; `python -m benchmarks` makes them")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), read_results(results)), encoding="utf-8")


if __name__ == "__main__":
    main()
