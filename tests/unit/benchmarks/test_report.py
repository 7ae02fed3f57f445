"""Tables of results: what they say, and how they get into the page."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import RESULTS, SECTIONS, keep
from benchmarks.docs import PAGE, read_results, rendered, written
from benchmarks.report import Figure, Row, Section, Table, row

ROWS = [
    row("quick", 0.5, 0.6, "a note"),
    row("slow", 0.7, 0.6),
    row("speed", 5.0, 4.5, higher_is_better=True),
    row("start", 2.5, 3, unit="s"),
    row("gone", None, 1.0, reason="not installed"),
    row("plain", 1234.5),
]
SEVERAL = Table(
    "Two columns",
    [Row("a", {"exact": Figure(1.5, 1.03), "fast": Figure(None, 0.6, reason="not built")}), Row("b", {})],
    ("exact", "fast"),
)
SECTION = Section(
    [Table("One column", ROWS, note="Against | nothing.".replace("| ", "")), SEVERAL],
    {"date": "2026-01-02", "torch": "2.14"},
)


def test_a_figure_is_a_hit_or_a_miss_by_the_side_of_its_target() -> None:
    assert [entry.figures["measured"].verdict for entry in ROWS] == ["hit", "miss", "hit", "hit", "", ""]


@pytest.mark.parametrize("is_higher_better", [True, False])
def test_the_target_itself_is_a_hit_and_nan_is_a_miss(is_higher_better: bool) -> None:
    assert Figure(0.5, 0.5, is_higher_better).verdict == "hit"
    assert Figure(float("nan"), 0.5, is_higher_better).verdict == "miss"


def test_one_column_has_its_target_beside_it_and_misses_stand_out() -> None:
    assert Table("t", ROWS).markdown().splitlines()[2:] == [
        "| quick | 0.50 | <= 0.6 | hit | a note |",
        "| slow | 0.70 | <= 0.6 | **miss** |  |",
        "| speed | 5.00 | >= 4.5 | hit |  |",
        "| start | 2.50 s | <= 3 s | hit |  |",
        "| gone | not measured | <= 1 |  | not installed |",
        "| plain | 1,234 |  |  |  |",
    ]


def test_several_columns_have_targets_in_their_cells() -> None:
    assert SEVERAL.markdown().splitlines() == [
        "| | exact | fast | |",
        "|---|---|---|---|",
        "| a | 1.50 (<= 1.03, **miss**) | not measured: not built |  |",
        "| b |  |  |  |",
    ]


def test_results_are_the_same_after_a_file(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    keep(file, "serving", SECTION)
    found = read_results(file)
    assert [table.markdown() for table in found["serving"].tables] == [t.markdown() for t in SECTION.tables]
    assert found["serving"].machine == SECTION.machine


def test_a_section_that_is_measured_again_takes_the_place_of_its_own_results_only(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    keep(file, "serving", SECTION)
    keep(file, "start", SECTION)
    keep(file, "serving", Section([SEVERAL]))
    found = json.loads(file.read_text())
    assert list(found) == ["serving", "start"]
    assert len(found["serving"]["tables"]) == 1
    assert len(found["start"]["tables"]) == 2


def test_tables_are_written_between_their_marks_and_nothing_else_changes() -> None:
    page = "# Page\n\n<!-- bench: start -->\nold\n<!-- end of bench: start -->\n\nText with a \\1.\n"
    once = written(page, {"start": SECTION})
    assert once.startswith("# Page\n\n<!-- bench: start -->\n\nMeasured with `python -m benchmarks start`")
    assert once.endswith("<!-- end of bench: start -->\n\nText with a \\1.\n")
    assert "old" not in once
    assert "| slow | 0.70 | <= 0.6 | **miss** |  |" in once
    assert written(once, {"start": SECTION}) == once


def test_a_page_without_a_place_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for 'start'"):
        written("# Page\n", {"start": SECTION})


def test_the_page_has_a_place_for_every_section() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert all(rendered(name, SECTION) in written(page, {name: SECTION}) for name in SECTIONS)


def test_figures_of_the_page_are_those_of_the_last_results() -> None:
    results = read_results(RESULTS) if RESULTS.exists() else {}
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, results) == page
