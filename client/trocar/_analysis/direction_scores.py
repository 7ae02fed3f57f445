"""Scores of fitted directions by place: a table and a plot."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trocar._base.names import unknown_name
from trocar._base.tables import html_table, number_text
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

    from trocar._result.directions import StoredDirection


@dataclass(frozen=True)
class DirectionScores:
    """The directions of one fit, in the order of the places; see `Client.fit_direction`.

    fitted = client.fit_direction("vit", "photos/", taps=["layer[*]"])
    fitted.best.place                    # where the classes are told apart best
    print(fitted)                        # a row for each place
    """

    rows: tuple[StoredDirection, ...]
    """One for each place."""

    def __getitem__(self, place: str) -> StoredDirection:
        """Return the direction of a place.

        Raises:
            KeyError: There is none.
        """
        for row in self.rows:
            if row.place == place:
                return row
        raise unknown_name("place", place, [row.place for row in self.rows])

    def __iter__(self) -> Iterator[StoredDirection]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def name(self) -> str:
        """Their name, for `trocar.readout` and edits."""
        return self.rows[0].name

    @property
    def best(self) -> StoredDirection:
        """The direction with the highest score; of equal ones the first.

        Raises:
            ValueError: There are no scores: nothing was held out.
        """
        scored = [row for row in self.rows if row.score is not None]
        if not scored:
            raise ValueError("there are no scores without folds; fit with folds=5, for example")
        return max(scored, key=lambda row: (row.score, row.auc or 0.0))

    def plot(self, path: str | os.PathLike[str] | None = None) -> Figure:
        """Draw the score of each place, with the range of its folds.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.pictures import draw_directions, saved  # needs matplotlib, which is an extra

        return saved(draw_directions(self), path)

    def __str__(self) -> str:
        head, rows = self._table()
        return f"{self._title()}\n{text_table(head, rows, right=head[1:])}"

    def __repr__(self) -> str:
        return f"<DirectionScores {self._title()}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        head, rows = self._table()
        return html_table(head, rows, self._title())

    def _title(self) -> str:
        first = self.rows[0]
        places = f"{len(self.rows)} place{'s' * (len(self.rows) != 1)}"
        return f"{first.name}: {first.kind} of {first.sample_count:,} samples at {places} of {first.model_id}"

    def _table(self) -> tuple[Sequence[str], list[Sequence[str]]]:
        score = self.rows[0].score_name or "score"
        head = ("place", score, "folds", "auc", "mean norm")
        rows: list[Sequence[str]] = [
            (
                row.place,
                "" if row.score is None else number_text(row.score),
                _range(row.fold_scores),
                "" if row.auc is None else number_text(row.auc),
                number_text(row.mean_norm),
            )
            for row in self.rows
        ]
        return head, rows


def _range(scores: tuple[float, ...]) -> str:
    return f"{number_text(min(scores))} to {number_text(max(scores))}" if scores else ""
