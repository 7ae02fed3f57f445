"""Run of `trocar extract` into a folder: progress bar and summary."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from trocar import Client, DatasetReport, Progress, Texts, extract_dataset
from trocar._base.tables import size_text
from trocar._cli.console import shape_text, show, show_json, table
from trocar._cli.failures import FAILED
from trocar._cli.options.samples import expand

_SHOWN_FAILURES = 5
_INTERRUPTED = 130
"""What shells report of a program that Ctrl-C ended."""


def run_dataset(
    client: Client,
    model_id: str,
    source: list[str] | Texts,
    taps: list[str],
    out: Path,
    *,
    as_json: bool,
    ray: str = "",
    workers: int = 4,
    **options: Any,
) -> None:
    """Extract from sources or texts into a folder and report.

    Args:
        client: The client.
        model_id: The model.
        source: Names of sources, or texts.
        taps: Values to collect.
        out: The folder.
        as_json: Whether to print JSON.
        ray: Address of a Ray cluster whose nodes read and send; this machine when empty.
        workers: Actors on that cluster.
        options: Those of `extract_dataset`.

    Raises:
        TrocarError: A call failed, or source or output cannot be used.
        typer.Exit: It was interrupted.
    """
    try:
        with _bar(model_id) as progress:
            if ray:
                import trocar.ray

                with trocar.ray.session(ray):
                    report = trocar.ray.extract_dataset(
                        client, model_id, source, taps, out, workers=workers, progress=progress, **options
                    )
            else:
                report = extract_dataset(client, model_id, source, taps, out, progress=progress, **options)
    except KeyboardInterrupt:
        typer.echo(f"interrupted; run the same command again to resume {out}", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        show_json(_as_json(report))
    else:
        for note in report.notes:
            typer.echo(f"note: {note}", err=True)
        _show(report)
    if not report.row_count:
        raise typer.Exit(FAILED)


def expanded(sources: list[str]) -> list[str]:
    """Return sources with their patterns expanded; names of datasets as they are.

    Raises:
        typer.BadParameter: A path does not exist, or is a URL.
    """
    result: list[str] = []
    for source in sources:
        result += [source] if source.startswith(("torch:", "hf:")) else map(str, expand(source))
    return result


@contextmanager
def _bar(model_id: str) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on a terminal; yield its update function."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[count]}", markup=False),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(model_id, total=None, count="", rate="")
        begun: list[tuple[float, int]] = []

        def move(progress: Progress) -> None:
            now = monotonic()
            if not begun:
                begun.append((now, progress.sample_count))
            seconds, count = now - begun[0][0], progress.sample_count - begun[0][1]
            bar.update(
                task,
                total=None if progress.fraction is None else 1.0,
                completed=progress.fraction or 0.0,
                count=_count_text(progress),
                rate=f"{count / seconds:,.1f} samples/s" if count and seconds else "",
            )

        yield move


def _count_text(progress: Progress) -> str:
    total = "" if progress.total is None else f"/{progress.total:,}"
    failed = f", {progress.failed_count:,} failed" if progress.failed_count else ""
    return f"{progress.sample_count:,}{total}{failed}"


def _show(report: DatasetReport) -> None:
    rows = table("feature map", "shape")
    for name, shape in report.shapes.items():
        rows.add_row(name, shape_text(shape).replace("-1", "*"))
    show(rows)
    shards = f"{report.shard_count} shard{'' if report.shard_count == 1 else 's'}"
    size = size_text(report.byte_count)
    new = report.sample_count - report.resumed_at
    if not new:
        typer.echo(f"{report.out} is complete already: {report.row_count:,} rows, {shards}, {size}")
    else:
        begun = f", {report.resumed_at:,} of them by earlier runs" if report.resumed_at else ""
        rate = f"{new / report.duration_s:,.1f} samples/s" if report.duration_s else ""
        typer.echo(f"wrote {report.out}: {report.sample_count:,} samples{begun}, {shards}, {size}")
        typer.echo(f"took {report.duration_s:.1f} s, {rate}")
    _show_failures(report)


def _show_failures(report: DatasetReport) -> None:
    if not report.failed:
        return
    sys.stdout.flush()
    count = len(report.failed)
    typer.echo(
        "1 sample failed and has no row:" if count == 1 else f"{count:,} samples failed and have no row:",
        err=True,
    )
    for failure in report.failed[:_SHOWN_FAILURES]:
        typer.echo(f"  {failure.key}: {failure.message} [{failure.reason}]", err=True)
    if count > _SHOWN_FAILURES:
        typer.echo(f"  all of them are in {report.out / 'manifest.json'}, under failed", err=True)


def _as_json(report: DatasetReport) -> dict[str, Any]:
    return {**asdict(report), "out": str(report.out)}
