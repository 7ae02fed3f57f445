"""`trocar bench`: how fast a server answers, by model, taps, batch, clients and numerics."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trocar import Client
from trocar._analysis.inputs import images_in
from trocar._bench.case import NUMERICS, Settings, cases
from trocar._bench.local import is_torch_here
from trocar._bench.schedule import FIXED, POISSON, Rate, parse_rates
from trocar._cli.arguments import AsJson, parse_shape
from trocar._cli.bench_run import Inputs, report, run_cases
from trocar._cli.bench_table import bench_table
from trocar._cli.failures import USAGE, fail, refuse
from trocar._cli.input_sets import Plot, check_plot
from trocar._cli.output import plain, show, show_json


class Arrivals(StrEnum):
    """How far the calls of an open loop lie apart."""

    POISSON = POISSON
    FIXED = FIXED


def bench(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_ids: Annotated[
        list[str], typer.Argument(metavar="MODEL", help="Ids of loaded models; see `trocar models`.")
    ],
    *,
    tap: Annotated[
        list[str] | None,
        typer.Option("--tap", help="What to collect; repeat for more. The model's output without it."),
    ] = None,
    each_tap: Annotated[
        bool, typer.Option("--each-tap", help="Measure every --tap alone, not all in one call.")
    ] = False,
    batch: Annotated[str, typer.Option(help="Images per call, for example 1,32.")] = "1",
    clients: Annotated[str, typer.Option(help="Who call at once, for example 1,8,32.")] = "1",
    numerics: Annotated[
        str, typer.Option(help=f"Any of {','.join(NUMERICS)}; the model's default without it.")
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            help="Open loop: calls per second, whatever the server does: 50, 10,20,50, or 0.5x..3x of what "
            "a closed loop reaches."
        ),
    ] = "",
    arrivals: Annotated[
        Arrivals, typer.Option(help="Of an open loop: random or equal gaps.")
    ] = Arrivals.POISSON,
    images: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Send the images of this folder, not random numbers."
        ),
    ] = None,
    input: Annotated[
        str | None, typer.Option(help="Shape of one random sample; the model's own without it.")
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Compare with eager torchvision here, in a process of its own, in turn."
        ),
    ] = False,
    duration: Annotated[float, typer.Option(min=0.01, help="Seconds of each case.")] = 10.0,
    warm_up: Annotated[float, typer.Option(min=0, help="Seconds before, which do not count.")] = 2.0,
    engine_wait: Annotated[
        float, typer.Option(min=0, help="Seconds to wait, longest, until the numerics asked for are used.")
    ] = 60.0,
    rounds: Annotated[int, typer.Option(min=1, help="Parts of a case; local passes come between.")] = 4,
    calls: Annotated[
        int | None, typer.Option(min=1, help="Calls of each client in a round, instead of --duration.")
    ] = None,
    processes: Annotated[
        int, typer.Option(min=0, help="Processes of the clients; 0 for one each, up to the cores.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of random inputs and arrivals.")] = 0,
    cache: Annotated[
        bool, typer.Option("--cache", help="Let the server's feature cache answer, where it has one.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge/--no-merge", help="Let the server run batches of several calls together.")
    ] = True,
    plot: Plot = None,
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the results there as JSON as well.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure how fast the server answers: latency, throughput, and where the time goes.

    Clients are processes, and threads of these beyond the number of cores. Times are in ms. An answer that is
    late in an open loop delays no other call, and its latency counts from when the call was due.
    """
    check_plot(plot)
    if out is not None and not out.parent.is_dir():
        refuse(f"--out: there is no folder {out.parent}")
    if local and not is_torch_here():
        fail("--local needs torch and torchvision here: pip install torch torchvision", USAGE)
    settings = Settings(duration, rounds, warm_up, engine_wait, arrivals.value, seed, processes, calls)
    wanted = cases(
        model_ids,
        _taps(tap or ["/out"], each_tap=each_tap),
        batches=_numbers(batch, "--batch"),
        clients=_numbers(clients, "--clients"),
        numerics=_numerics(numerics),
        rates=_rates(rate),
    )
    inputs = Inputs(_images(images), parse_shape(input), seed, cache, merge)
    results = run_cases(client, list(wanted), inputs, settings, local=local)
    told = report(client, results, settings)
    if out is not None:
        out.write_text(json.dumps(plain(told), indent=2) + "\n", encoding="utf-8")
    if plot is not None:
        from trocar._bench.picture import draw  # needs matplotlib, which is an extra

        draw(results).savefig(plot)
    if as_json:
        show_json(told)
    else:
        show(bench_table(results))


def _taps(selectors: Sequence[str], *, each_tap: bool) -> list[tuple[str, ...]]:
    return [(selector,) for selector in selectors] if each_tap else [tuple(selectors)]


def _numbers(text: str, option: str) -> list[int]:
    """Read `1,8,32`.

    Raises:
        typer.BadParameter: It is not that.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        refuse(f"{option}: {text!r} is no list of numbers above 0; write for example 1,8,32")
    return numbers


def _numerics(text: str) -> list[str | None]:
    """Read `exact,fast`; nothing is the model's default.

    Raises:
        typer.BadParameter: A word is unknown.
    """
    if not text:
        return [None]
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in NUMERICS]
    if unknown:
        refuse(f"--numerics: no numerics {unknown[0]!r}; there is {', '.join(NUMERICS)}")
    return list(names)


def _rates(text: str) -> Sequence[Rate | None]:
    """Read the rates of open loops; nothing is a closed loop.

    Raises:
        typer.BadParameter: They are none.
    """
    if not text:
        return [None]
    try:
        return parse_rates(text)
    except ValueError as error:
        refuse(f"--rate: {error}")


def _images(folder: Path | None) -> tuple[Path, ...]:
    if folder is None:
        return ()
    try:
        return tuple(images_in(folder))
    except ValueError as error:
        refuse(f"--images: {error}")
