"""Arguments and options shared by several commands."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from trocar._cli.failures import refuse
from trocar._cli.options.completion import complete_models, complete_modules
from trocar._request.taps import STATISTICS, Over, Tap, tap
from trocar_api.value_words import not_one_of

if TYPE_CHECKING:
    from trocar._request.statistic_options import StatisticName

MAX_INTEGER = (1 << 63) - 1
"""Of sizes and numbers in a request."""

ModelId = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_models,
        help="The id of a loaded model; see `trocar models`.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Taps = Annotated[
    list[str],
    typer.Option(
        "--tap",
        metavar="SELECTOR",
        autocompletion=complete_modules,
        help="Selector to collect, for example layer4 or layer*.0.relu@1; repeat for more.",
    ),
]
BatchSize = Annotated[int, typer.Option("--batch", metavar="NUMBER", min=1, help="Images per call.")]
OtherModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        autocompletion=complete_models,
        help="A second model, for the columns. Default: MODEL_ID itself.",
    ),
]
OtherTaps = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SELECTOR",
        autocompletion=complete_modules,
        help="Selector for the columns, if not --tap; repeat for more.",
    ),
]


NUMBERS = tuple(name for name in STATISTICS if name not in ("quantiles", "histogram", "covariance"))
"""The statistics that are one number for each group, as a table shows them."""


def parse_statistics(text: str) -> "tuple[StatisticName, ...]":
    """Read `mean,std`.

    Raises:
        typer.BadParameter: An unknown name.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        refuse(f"--stats: a statistic {not_one_of(unknown[0], NUMBERS)}")
    several = [name for name in names if name not in NUMBERS]
    if several:
        refuse(f"--stats: {several[0]} has more than one number per value; use trocar.tap in Python for it")
    return cast("tuple[StatisticName, ...]", names)


def statistics_taps(
    selectors: Sequence[str], names: "Sequence[StatisticName]", *, values: bool, over: Over = "all"
) -> list[Tap]:
    """Return a tap with these statistics for each selector.

    Raises:
        typer.BadParameter: A statistic has no meaning with `over`.
    """
    try:
        return [tap(selector, stats=names, values=values, over=over) for selector in selectors]
    except ValueError as error:
        refuse(f"--stats: {error}")


def check_file(out: Path, suffix: str) -> None:
    """Check that a file can be written, before anything is computed for it.

    Raises:
        typer.BadParameter: It has another suffix, is a folder, or its folder does not exist.
    """
    if out.suffix != suffix:
        refuse(f"--out: {out.name!r} must end in {suffix}")
    if out.is_dir():
        refuse(f"--out: {str(out)!r} is a folder")
    if not out.absolute().parent.is_dir():
        refuse(f"--out: no folder {out.parent}")


def parse_shape(text: str | None) -> tuple[int, ...] | None:
    """Read `8,3,224,224`.

    Raises:
        typer.BadParameter: It is no shape.
    """
    if text is None:
        return None
    try:
        sizes = tuple(int(size) for size in text.strip("() ").split(","))
    except ValueError:
        sizes = ()
    if not sizes or any(abs(size) > MAX_INTEGER for size in sizes):
        refuse(f"--input: {text!r} is not a shape; write for example 1,3,224,224")
    return sizes
