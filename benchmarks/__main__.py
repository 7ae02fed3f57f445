"""All benchmarks, or some: `make bench`, `python -m benchmarks serving growth --quick`."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from benchmarks import machine
from benchmarks.measuring import Effort
from benchmarks.report import Section

SECTIONS = (
    *(
        "calls",
        "serving",
        "builds",
        "cache",
        "start",
        "growth",
        "streams",
        "bulk",
        "transport",
        "prepared",
        "generation",
        "directions",
        "surgery",
        "training",
    ),
    *("gpu", "page", "peers"),
)
RESULTS = Path(__file__).parent / "results.json"
"""The last results; `python -m benchmarks.docs` writes them into docs/performance.md."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("sections", nargs="*", help=f"any of {', '.join(SECTIONS)}; all when none is named")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    parser.add_argument(
        "--json", type=Path, help=f"where to write results; {RESULTS.name} beside this, but of a quick run"
    )
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.sections if name not in SECTIONS]:
        parser.error(f"no section {unknown[0]!r}; available: {', '.join(SECTIONS)}")
    file = given.json or (None if given.quick else RESULTS)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # as users: each process would compile ours
    for name in given.sections or SECTIONS:
        section = measure(name, Effort(given.quick))
        if file is not None:
            keep(file, name, section)


def measure(name: str, effort: Effort) -> Section:
    """Measure one section, and print it."""
    print(f"\n## {name}", flush=True)
    started = time.monotonic()
    tables = []
    for table in import_module(f"benchmarks.sections.{name}").run(effort):
        print(f"\n### {table.title}\n\n{table.markdown()}", flush=True)
        tables.append(table)
    took = time.monotonic() - started
    print(f"\n{took:.0f} s", flush=True)
    return Section(tables, {**machine.describe(), "duration": f"{took:.0f} s"})


def keep(file: Path, name: str, section: Section) -> None:
    """Put a section into the file of results, in place of the one before."""
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    results[name] = section.to_json()
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
