"""Demo requests, and the display of their results."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import trocar
from trocar._base.tables import size_text
from trocar._base.tensors import Array
from trocar._cli.console import shape_text, show, table
from trocar._cli.demo.demo_picture import draw
from trocar._cli.runs.statistics_view import StatisticsTable, overall_table
from trocar._request.statistic_options import StatisticName

STATISTICS: tuple[StatisticName, ...] = ("mean", "std", "min", "max", "zero_fraction")
DEPTHS = ("_blocks.0", "_blocks.2", "_blocks.4", "_blocks.10", "head")
"""Feature maps that the picture shows, from the first block to the last."""

TAPS = [
    *(trocar.tap(name, stats=STATISTICS) for name in DEPTHS[:-1]),
    trocar.tap("_swish@1", alias="head", stats=STATISTICS),
    trocar.tap("_fc", alias="logits", stats=STATISTICS),
]
"""`_swish` is called twice in one pass; the second call is what the classifier sees."""

CAM_AT = "_blocks.15"
"""The last block: deep enough for classes, and still 7 x 7 positions."""

Probabilities = NDArray[np.float64]


def show_shapes(maps: trocar.FeatureMaps) -> None:
    """Print name, origin, shape and size of each feature map."""
    rows = table("feature map", "module", "type", "shape", "dtype", "size", right=("size",))
    for name, info in maps.info.items():
        size = size_text(maps[name].nbytes)
        rows.add_row(name, info.path, info.type, shape_text(info.shape), info.dtype, size)
    show(rows)


def show_statistics(maps: trocar.FeatureMaps) -> None:
    """Print the statistics of each feature map."""
    statistics = StatisticsTable(STATISTICS)
    statistics.add(maps)
    show(overall_table(statistics))


def show_classes(logits: Array, categories: Sequence[str], images: Sequence[Path]) -> None:
    """Print the five most likely classes of each photograph."""
    for image, row in zip(images, probabilities(logits), strict=True):
        rows = table(image.name, "probability", right=("probability",))
        for index in top(row, 5):
            rows.add_row(categories[index], f"{row[index]:.3f}")
        show(rows)
        show("")


def save_results(
    maps: trocar.FeatureMaps, categories: Sequence[str], images: Sequence[Path], out: Path
) -> None:
    """Write the feature maps and the picture of them."""
    from trocar._base.figures import save_figure  # needs matplotlib

    maps.save(out / "features.safetensors")
    rows = probabilities(maps["logits"])
    best = [[(categories[index], float(row[index])) for index in top(row, 5)] for row in rows]
    figure = draw(images, {name: maps[name] for name in DEPTHS}, best)
    save_figure(figure, out / "feature-maps.png", facecolor=figure.get_facecolor())


def probabilities(logits: Array) -> Probabilities:
    """Return the softmax of (batch, classes) over the classes, in float64."""
    powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    normalised: Probabilities = powers / powers.sum(axis=1, keepdims=True)
    return normalised


def top(row: Probabilities, count: int) -> list[int]:
    """Return the positions of the largest values, the largest first."""
    return [int(index) for index in np.argsort(row)[::-1][:count]]
