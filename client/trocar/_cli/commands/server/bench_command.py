"""`trocar bench`: latency and throughput of a server, by model, taps, batch, clients and numerics."""

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trocar import Client
from trocar._analysis.analysis_inputs import images_in
from trocar._base.replacement import write_file
from trocar._bench.case import NUMERICS, Settings, cases
from trocar._bench.local_passes import is_torch_here
from trocar._bench.schedule import FIXED, POISSON, Rate, parse_rates
from trocar._cli.console import plain, show, show_json
from trocar._cli.failures import USAGE, fail, refuse
from trocar._cli.options.arguments import AsJson, parse_shape
from trocar._cli.options.completion import complete_models, complete_modules
from trocar._cli.options.input_sets import Plot, check_plot
from trocar._cli.runs.bench_run import Inputs, report, run_cases
from trocar._cli.runs.bench_table import bench_table
from trocar_api.value_words import not_one_of


class Arrivals(StrEnum):
    """How far the calls of an open loop lie apart."""

    POISSON = POISSON
    FIXED = FIXED


def bench(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_ids: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
            help="Ids of loaded models; see `trocar models`.",
        ),
    ],
    *,
    tap: Annotated[
        list[str] | None,
        typer.Option(
            "--tap",
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector of a value to collect; repeat for more. Default: the model's output.",
        ),
    ] = None,
    each_tap: Annotated[bool, typer.Option("--each-tap", help="Measure each --tap in its own call.")] = False,
    batch: Annotated[str, typer.Option(metavar="NUMBERS", help="Images per call, for example 1,32.")] = "1",
    clients: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Concurrent clients, for example 1,8,32.")
    ] = "1",
    numerics: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Any of {','.join(NUMERICS)}. Default: the model's.")
    ] = "",
    rate: Annotated[
        str,
        typer.Option(
            metavar="RATES",
            help="Open loop: calls per second, at any server speed: 50, 10,20,50, or 0.5x..3x of what "
            "a closed loop reaches.",
        ),
    ] = "",
    arrivals: Annotated[
        Arrivals, typer.Option(help="Gaps between calls of an open loop: random or equal.")
    ] = Arrivals.POISSON,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Send the images of this folder, not random numbers.",
        ),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(metavar="SHAPE", help="Shape of one random sample. Default: the model's input shape."),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local", help="Also measure eager torchvision on this machine, in its own process, alternating."
        ),
    ] = False,
    duration: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.01, help="Duration of each case, in seconds.")
    ] = 10.0,
    warm_up: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Warm-up before each case, in seconds; not counted."),
    ] = 2.0,
    engine_wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="Longest wait for the requested numerics to be in use, in seconds."
        ),
    ] = 60.0,
    rounds: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Rounds per case; local passes run between rounds.")
    ] = 4,
    calls: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=1, help="Calls per client and round, instead of --duration."),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            metavar="NUMBER", min=0, help="Client processes; 0 for one per client, up to the number of cores."
        ),
    ] = 0,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, help="Seed of random inputs and arrivals.")
    ] = 0,
    cache: Annotated[
        bool, typer.Option("--cache", help="Allow answers from the server's feature cache.")
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge/--no-merge", help="Allow the server to merge calls into one batch.")
    ] = True,
    plot: Plot = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Also write the results to this JSON file."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency and throughput of a server.

    Clients are processes, and threads of these beyond the number of cores. Times are in ms. An answer that is
    late in an open loop delays no other call, and its latency counts from when the call was due.
    """
    check_plot(plot)
    if out is not None and not out.parent.is_dir():
        refuse(f"--out: no folder {out.parent}")
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
        write_file(out, json.dumps(plain(told), indent=2) + "\n")
    if plot is not None:
        from trocar._base.figures import save_figure  # needs matplotlib, which is an extra
        from trocar._bench.bench_picture import draw

        save_figure(draw(results), plot)
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
        refuse(f"{option}: {text!r} is not a list of positive numbers; write for example 1,8,32")
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
        refuse(f"--numerics {not_one_of(unknown[0], NUMERICS)}")
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
