"""Tables in text and HTML, and lists that show as tables."""

import copy
import pickle

import pytest

from trocar._base.tables import Columns, Listing, first_lines, html_facts, html_fold, html_table
from trocar._base.text_tables import text_table

COLUMNS: Columns[int] = {"number": str, "square": lambda number: str(number * number)}


def listing(count: int) -> Listing[int]:
    return Listing(range(count), COLUMNS)


def test_a_listing_equals_the_list_of_its_entries() -> None:
    assert listing(3) == [0, 1, 2]
    assert listing(0) == []
    assert isinstance(listing(2), list)
    assert listing(4)[1:3] == [1, 2]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copied_listing_is_a_plain_list(copied: object) -> None:
    assert callable(copied)
    assert copied(listing(3)) == [0, 1, 2]


def test_a_short_listing_is_a_table_in_text() -> None:
    assert repr(listing(2)).splitlines() == ["number  square", "0       0", "1       1"]
    assert repr(listing(0)) == str(listing(0)) == "[]"


def test_a_listing_leaves_out_columns_that_are_empty_in_every_row() -> None:
    columns: Columns[int] = {"number": str, "error": lambda number: "odd" if number == 3 else ""}
    assert repr(Listing([1, 2], columns)).splitlines() == ["number", "1", "2"]
    assert "error" not in Listing([1, 2], columns)._repr_html_()
    assert repr(Listing([1, 3], columns)).splitlines() == ["number  error", "1", "3       odd"]
    assert "error" in Listing([], columns)._repr_html_()


def test_a_long_listing_shows_eight_lines_and_prints_sixty_rows() -> None:
    assert len(repr(listing(100)).splitlines()) == 8
    assert repr(listing(100)).splitlines()[-1] == "… and 94 more"
    assert len(str(listing(60)).splitlines()) == 61
    assert str(listing(100)).splitlines()[-2:] == ["58      3364", "… and 41 more"]


def test_a_table_in_html_has_at_most_sixty_rows() -> None:
    html = html_table(("a", "b"), [(str(number), "x") for number in range(75)])
    assert html.count("<tr>") == 62
    assert html.endswith('<tr><td colspan="2">… and 15 more</td></tr></table>')
    assert "more" not in html_table(("a",), [("x",)] * 60)


def test_facts_that_are_unknown_are_left_out() -> None:
    assert html_facts({"a": 1, "b": "", "c": None, "d": 0}) == (
        "<table><tr><th>a</th><td>1</td></tr><tr><th>d</th><td>0</td></tr></table>"
    )


def test_every_text_in_html_is_escaped() -> None:
    evil = "<script>'\"&"
    made = html_table((evil,), [(evil,)], evil) + html_facts({evil: evil}, evil) + html_fold(evil, "")
    assert "<script" not in made
    assert made.count("&lt;script&gt;&#x27;&quot;&amp;") == 7


def test_a_text_table_is_aligned() -> None:
    assert text_table(("a", "long"), [("xyz", "1")], ("long",)) == "a    long\nxyz     1"


def test_lines_are_counted_where_they_are_cut() -> None:
    assert first_lines("a\nb\nc", 3) == "a\nb\nc"
    assert first_lines("a\nb\nc\nd", 3) == "a\nb\n… and 2 more"
