"""Tables of statistics, of a whole run or per sample."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from trocar import FeatureMapInfo, FeatureMaps, Statistics
from trocar._cli.console import Rows, number_text, shape_text, show, table

Number: TypeAlias = float | int | list[float] | list[int]


class StatisticsTable:
    """The statistics of every feature map of a run.

        statistics = StatisticsTable(["std"])
        for maps in batches:
            statistics.add(maps)             # per sample: appended rows
        statistics.finish(stream.statistics, stream.info)     # over all batches

    Args:
        names: The statistics that `values` returns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.parameters: set[str] = set()
        self._values: dict[str, dict[str, Number]] = {}

    def add(self, maps: FeatureMaps) -> None:
        """Add the statistics of one batch; a known feature map's are appended, but for parameters."""
        for name, statistics in maps.stats.items():
            if maps.info[name].port.startswith("param("):
                self.parameters.add(name)  # it has no samples, and is the same in every pass
                self.finish({name: statistics}, maps.info)
                continue
            shape, before = maps.info[name].shape, self._values.get(name, {})
            self._values[name] = {
                key: _joined(before.get(key), number) for key, number in self._numbers(statistics).items()
            }
            known = self.shapes.get(name)
            self.shapes[name] = (known[0] + shape[0], *shape[1:]) if known else shape

    def finish(self, statistics: Mapping[str, Statistics], info: Mapping[str, FeatureMapInfo]) -> None:
        """Add the statistics of an entire stream."""
        for name, result in statistics.items():
            self._values[name] = self._numbers(result)
            self.shapes[name] = info[name].shape

    def values(self) -> dict[str, dict[str, Number]]:
        """Return each statistic by feature map: a number over all, a list over channels or samples."""
        return self._values

    def _numbers(self, statistics: Statistics) -> dict[str, Number]:
        result = statistics.as_dict()
        return {name: _plain(result[name], is_whole=name.endswith("count")) for name in self.names}


def show_statistics(statistics: StatisticsTable, row_names: Sequence[str] = ()) -> None:
    """Print one table of all feature maps, or, for numbers per group, one for each.

    Args:
        statistics: Statistics to print.
        row_names: The samples' names, for statistics per sample. Without them, and where the first dimension
            of a value is not the samples, as of parameters, rows have positions.
    """
    values = statistics.values()
    if all(isinstance(number, (int, float)) for numbers in values.values() for number in numbers.values()):
        show(overall_table(statistics))
        return
    for feature_map, numbers in values.items():
        title = f"{feature_map} {shape_text(statistics.shapes[feature_map])}"
        show(_group_table(title, numbers, row_names, feature_map in statistics.parameters))


def overall_table(statistics: StatisticsTable) -> Rows:
    """Return a table with a row per feature map and a column per statistic."""
    rows = table("feature map", "shape", *statistics.names, right=statistics.names)
    for feature_map, numbers in statistics.values().items():
        cells = [number_text(number) for number in numbers.values() if not isinstance(number, list)]
        rows.add_row(feature_map, shape_text(statistics.shapes[feature_map]), *cells)
    return rows


def _group_table(
    title: str, numbers: Mapping[str, Number], row_names: Sequence[str], is_parameter: bool
) -> Rows:
    groups = list(zip(*(number for number in numbers.values() if isinstance(number, list)), strict=True))
    has_names = len(groups) == len(row_names) and not is_parameter
    heading = "channel" if not row_names else "sample" if has_names else "row"
    rows = table(heading, *numbers, right=numbers)
    rows.title = title
    for name, cells in zip(row_names if has_names else map(str, range(len(groups))), groups, strict=True):
        rows.add_row(name, *map(number_text, cells))
    return rows


def _plain(value: Any, *, is_whole: bool) -> Number:
    if not isinstance(value, np.ndarray):
        return value if isinstance(value, int) else float(value)
    numbers: list[float] | list[int] = (value.astype(np.int64) if is_whole else value).tolist()
    return numbers


def _joined(before: Number | None, number: Number) -> Number:
    if isinstance(before, list) and isinstance(number, list):
        return [*before, *number]
    return number
