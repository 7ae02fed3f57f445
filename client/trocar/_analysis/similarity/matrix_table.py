"""Tables of a matrix whose rows and columns are feature maps."""

from __future__ import annotations

from collections.abc import Sequence

from trocar._analysis.moments import Floats
from trocar._base.names import unknown_name

_MOST_TITLED = 8
"""Columns that a table shows under their names; more are numbered."""


def entry(matrix: Floats, rows: Sequence[str], columns: Sequence[str], names: tuple[str, str]) -> float:
    """Return the number of a row and a column.

    Raises:
        KeyError: A name is unknown.
    """
    row, column = names
    if row not in rows:
        raise unknown_name("row", row, rows)
    if column not in columns:
        raise unknown_name("column", column, columns)
    return float(matrix[rows.index(row), columns.index(column)])


def matrix_cells(
    matrix: Floats, row_names: Sequence[str], column_names: Sequence[str]
) -> tuple[Sequence[str], list[list[str]], list[str]]:
    """Return the titles, the rows and a legend of the table."""
    names, columns, legend = list(row_names), list(column_names), []
    if len(columns) > _MOST_TITLED:
        if names == columns:
            names = [f"{index} {name}" for index, name in enumerate(names)]
        else:
            legend = [f"{index} = {name}" for index, name in enumerate(columns)]
        columns = [str(index) for index in range(len(columns))]
    cells = [[name, *(f"{value:.3f}" for value in line)] for name, line in zip(names, matrix, strict=True)]
    return ["", *columns], cells, legend
