"""Tables of statistics."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from trocar._cli.merging import Number, StatisticsTable
from trocar._cli.output import number_text, shape_text, show, table


def show_statistics(statistics: StatisticsTable, row_names: Sequence[str] = ()) -> None:
    """Print one table of all feature maps, or, where there is a number per group, one for each.

    Args:
        statistics: What to print.
        row_names: The groups' names; their positions when empty.
    """
    values = statistics.values()
    if all(isinstance(number, (int, float)) for numbers in values.values() for number in numbers.values()):
        show(overall_table(statistics))
        return
    for feature_map, numbers in values.items():
        show(_group_table(f"{feature_map} {shape_text(statistics.shapes[feature_map])}", numbers, row_names))


def overall_table(statistics: StatisticsTable) -> Table:
    """Return a table with a row per feature map and a column per statistic."""
    rows = table("feature map", "shape", *statistics.names, right=statistics.names)
    for feature_map, numbers in statistics.values().items():
        cells = [number_text(number) for number in numbers.values() if not isinstance(number, list)]
        rows.add_row(feature_map, shape_text(statistics.shapes[feature_map]), *cells)
    return rows


def _group_table(title: str, numbers: Mapping[str, Number], row_names: Sequence[str]) -> Table:
    columns = [number for number in numbers.values() if isinstance(number, list)]
    rows = table("sample" if row_names else "channel", *numbers, right=numbers)
    rows.title, rows.title_justify, rows.title_style = title, "left", "bold"
    for index, cells in enumerate(zip(*columns, strict=True)):
        rows.add_row(row_names[index] if row_names else str(index), *map(number_text, cells))
    return rows
