"""Gradient health: norms, non-finite and zero gradients of a model in one pass."""

from __future__ import annotations

import math
import os
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from trocar._base.names import unknown_name
from trocar._base.tables import html_table, number_text
from trocar._base.text_tables import text_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

Flag: TypeAlias = Literal["nan", "inf", "exploding", "dead", "vanishing"]
FLAGS: tuple[Flag, ...] = get_args(Flag)
"""Every flag, the worst first."""

_HEAD = ("module", "type", "gradient", "zeros", "NaN", "Inf", "of weights", "weights", "ratio", "flags")
_NUMBERS = _HEAD[2:-1]


@dataclass(frozen=True)
class HealthThresholds:
    """Limits outside of which a gradient is flagged, in float64; the limits themselves are healthy.

    Raises:
        ValueError: A threshold is negative or not finite, or a lower one is not below the upper one.
    """

    vanishing: float = 1e-6
    """Norms below it, but not of zeros alone, are vanishing: at an output, and of own parameters together."""
    exploding: float = 1e3
    """Norms above it are exploding."""
    vanishing_ratio: float = 1e-6
    """The same for the norm of the parameters' gradient divided by the norm of the parameters."""
    exploding_ratio: float = 1e3
    """The same."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name}={value!r} must be 0 or a positive number")
        for low, high in (("vanishing", "exploding"), ("vanishing_ratio", "exploding_ratio")):
            if getattr(self, low) >= getattr(self, high):
                raise ValueError(f"{low}={getattr(self, low)!r} must be below {high}={getattr(self, high)!r}")


@dataclass(frozen=True)
class HealthRow:
    """One value of a pass and the parameters of its module; see `Client.health`."""

    name: str
    """The selector of the value, for example "layer1.0.relu@1"; of parameters alone, "fc/param(*)"."""
    path: str
    """The module's path; empty for the root."""
    type: str
    """The module's class name."""
    gradient_norm: float | None
    """Euclidean norm of the gradient with respect to the value; None for parameters alone: of the model
    itself, and of modules that the pass never calls, though it uses their parameters."""
    zero_fraction: float | None
    """Share of its elements that are zero, 0 to 1; NaN of no elements, None where `gradient_norm` is."""
    nan_count: int
    """NaN elements of it and of the gradients of the parameters."""
    inf_count: int
    """Infinite elements of both."""
    parameter_gradient_norm: float | None
    """Euclidean norm of the gradients of the module's own parameters, all together and over all of its
    calls; None where it has no parameter with a gradient."""
    weight_norm: float | None
    """Euclidean norm of these parameters, as the pass used them, or None."""
    ratio: float | None
    """`parameter_gradient_norm` divided by `weight_norm`; None without one, or it is zero."""
    flags: tuple[Flag, ...]
    """What is wrong with it, the worst first; empty where nothing is."""


@dataclass(frozen=True)
class Health:
    """Gradient health of a model, value by value in execution order; see `Client.health`.

    health = client.health("resnet50", images, of=trocar.loss("cross_entropy", labels))
    health["layer1.0.conv1"].ratio
    health.flagged                       # rows with a problem
    print(health)
    """

    rows: tuple[HealthRow, ...]
    """One for each value that has a gradient."""
    objective: float | None
    """The number that the gradients are taken of."""
    thresholds: HealthThresholds
    """Below and above what a gradient is flagged."""
    model_id: str
    """The model that ran."""

    def __getitem__(self, name: str) -> HealthRow:
        """Return the row of this name.

        Raises:
            KeyError: There is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise unknown_name("row", name, [row.name for row in self.rows])

    @property
    def flagged(self) -> tuple[HealthRow, ...]:
        """Flagged rows, in execution order."""
        return tuple(row for row in self.rows if row.flags)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data, rows as dicts, ready for a data frame; floats may be NaN."""
        return asdict(self)

    def plot(self, path: str | os.PathLike[str] | None = None, *, all_rows: bool = False) -> Figure:
        """Draw the norms over the modules, and the ratios below, on logarithmic axes; flags have colours.

        Args:
            path: The file of the picture; the suffix sets the format, for example ".png".
            all_rows: Whether to draw all rows, in execution order; otherwise at most the 30 most relevant.

        Raises:
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._analysis.health_picture import draw_health  # needs matplotlib, which is an extra
        from trocar._analysis.pictures import saved

        return saved(draw_health(self, all_rows=all_rows), path)

    def __str__(self) -> str:
        cells = list(self._cells())
        return "\n".join([*([text_table(_HEAD, cells, _NUMBERS)] if cells else []), self.summary])

    def __repr__(self) -> str:
        return f"<Health of {self.model_id}: {self.summary}>"

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(_HEAD, self._cells(), self.summary)

    @property
    def summary(self) -> str:
        """Counts of flagged rows by flag, in one line."""
        counts = Counter(flag for row in self.rows for flag in row.flags)
        result = ", ".join(f"{counts[flag]} {flag}" for flag in FLAGS if counts[flag])
        value = "" if self.objective is None else f"; objective {number_text(self.objective)}"
        return (
            f"{len(self.flagged)} of {len(self.rows)} flagged{': ' if result else ''}{result}"
            f" ({self._limits()}){value}"
        )

    def _limits(self) -> str:
        limits = self.thresholds
        return (
            f"norms {limits.vanishing:g} to {limits.exploding:g}, ratios {limits.vanishing_ratio:g} to "
            f"{limits.exploding_ratio:g}"
        )

    def _cells(self) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            yield (
                row.name,
                row.type,
                _text(row.gradient_norm),
                "" if row.zero_fraction is None else f"{row.zero_fraction:.1%}",
                str(row.nan_count or ""),
                str(row.inf_count or ""),
                _text(row.parameter_gradient_norm),
                _text(row.weight_norm),
                _text(row.ratio),
                ", ".join(row.flags),
            )


def _text(value: float | None) -> str:
    return "" if value is None else number_text(value)
