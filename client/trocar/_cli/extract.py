"""`trocar extract`: feature maps of many images into one file, or of a data set into a folder."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson, BatchSize, ModelId, Taps, parse_statistics, statistics_taps
from trocar._cli.call_clock import Clock
from trocar._cli.choices import Decode, Format, OnError
from trocar._cli.dataset_run import refuse_missing, run_dataset
from trocar._cli.edit_options import EditTexts, parse_edits
from trocar._cli.execution import NumericsOption, wire_numerics
from trocar._cli.failures import refuse
from trocar._cli.feature_file import FeatureFile
from trocar._cli.output import shape_text, show, show_json, size_text, table
from trocar._cli.passes import Pass, run_passes, samples_for, span
from trocar._cli.samples import Sample, is_one_batch
from trocar._cli.statistics_view import StatisticsTable, show_statistics
from trocar._datasets.options import MAX_SHARD_SIZE
from trocar._datasets.sources.files import SERVER_SUFFIXES, list_images
from trocar._datasets.sources.opening import kind_of
from trocar._edits import Edit
from trocar._execution import Numerics

_SUFFIX = ".safetensors"
_FILE_SUFFIXES = (".pt", ".pth", ".npz", ".npy", ".h5", ".hdf5", ".parquet", ".zarr", ".pkl", ".csv", ".json")
"""What no folder is called: whoever writes it wants one file of that format."""


def extract(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE",
            help="Image files, a folder, WebDataset .tar shards, .npy files, torch:module:name, "
            "hf:name:split:column.",
        ),
    ],
    tap: Taps,
    out: Annotated[Path, typer.Option(help="A .safetensors file, or a folder for shards; goes on there.")],
    *,
    batch: BatchSize = 16,
    format: Annotated[Format, typer.Option(help="Of the shards in a folder.")] = Format.SAFETENSORS,
    shard_size: Annotated[
        int, typer.Option(min=1, max=MAX_SHARD_SIZE, help="The most samples in a shard.")
    ] = 10_000,
    decode: Annotated[Decode, typer.Option(help="Who decodes images.")] = Decode.SERVER,
    on_error: Annotated[
        OnError, typer.Option(help="What to do with samples that fail; skip lists them in the manifest.")
    ] = OnError.STOP,
    limit: Annotated[int | None, typer.Option(min=1, help="Take so many samples.")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Throw away what the folder holds.")] = False,
    stats: Annotated[str, typer.Option(help="Print these as well, for example mean,std.")] = "",
    edit: EditTexts = None,
    timing: Annotated[bool, typer.Option("--timing", help="Say where the time went.")] = False,
    numerics: NumericsOption = None,
    as_json: AsJson = False,
) -> None:
    """Save what modules compute on images or on a whole data set.

    Into a folder: shards and a manifest. The same command goes on where a stopped one was, and the files
    are those of a run that was never stopped. Into one .safetensors file: it appears when it is whole.
    Rows are in the order of the source. Memory holds a few batches at a time.
    """
    names, edits = parse_statistics(stats), parse_edits(edit)
    if out.suffix == _SUFFIX:
        is_plain = (format, decode, on_error) == (Format.SAFETENSORS, Decode.SERVER, OnError.STOP)
        if not is_plain or restart:
            refuse("--format, --decode, --on-error and --restart need a folder: --out FOLDER")
        samples = samples_for(client, model_id, _paths(source))[:limit]
        clock = Clock() if timing else None
        _extract_to_file(
            client,
            model_id,
            samples,
            tap,
            out,
            batch,
            names,
            edits,
            numerics=wire_numerics(numerics),
            as_json=as_json,
            clock=clock,
        )
        return
    if out.suffix in _FILE_SUFFIXES or out.is_file():
        refuse(f"--out: {out.name!r} must end in {_SUFFIX}, or be a folder (with --format)")
    if timing:
        refuse("--timing needs --out FILE.safetensors")
    if names:
        refuse("--stats needs --out FILE.safetensors; `trocar stats` takes the same images")
    run_dataset(
        client,
        model_id,
        source,
        tap,
        out,
        as_json=as_json,
        edits=edits,
        format=format.value,
        batch=batch,
        shard_size=shard_size,
        decode=decode.value,
        on_error=on_error.value,
        limit=limit,
        restart=restart,
        numerics=wire_numerics(numerics) or "exact",
    )


def _paths(sources: list[str]) -> list[Path]:
    """List the files that a run into one file takes.

    Raises:
        typer.BadParameter: A source is not there, or only a folder can be written for it.
        SourceError: A folder has no image.
    """
    refuse_missing(sources)
    paths: list[Path] = []
    for source in sources:
        kind = kind_of(source)
        if kind not in ("file", "array", "folder"):
            refuse(f"{source}: how many samples there are is not known before, so --out has to be a folder")
        paths += list_images(Path(source), SERVER_SUFFIXES)[0] if kind == "folder" else [Path(source)]
    return paths


def _extract_to_file(  # noqa: PLR0913 - the options that a file has
    client: Client,
    model_id: str,
    samples: list[Sample],
    selectors: list[str],
    out: Path,
    batch: int,
    names: tuple[str, ...],
    edits: list[Edit | str],
    *,
    numerics: Numerics | None,
    as_json: bool,
    clock: Clock | None,
) -> None:
    statistics = StatisticsTable(names)
    taps = statistics_taps(selectors, names, values=True)
    is_whole = is_one_batch(samples, batch)
    with FeatureFile(out, sample_count=len(samples), is_one_batch=is_whole) as file:
        for one in run_passes(client, model_id, samples, taps, batch, statistics, edits, numerics):
            if clock is not None:
                clock.add(one.maps)
            file.append(
                one.maps,
                batch_size=len(one.samples),
                batch_name=span(one.samples),
                metadata=_metadata(one, samples, edits),
            )
    report = {
        "out": str(out),
        "image_count": len(samples),
        "shapes": file.shapes,
        "stats": statistics.values(),
    }
    if as_json:
        show_json(report if clock is None else report | {"timing": clock.report()})
        return
    _show_shapes(file.shapes, out)
    if clock is not None:
        typer.echo(str(clock))
    if names:
        show_statistics(statistics)


def _metadata(first: Pass, samples: list[Sample], edits: list[Edit | str]) -> dict[str, str]:
    """Return what `FeatureMaps.save` writes, for all images, their names, and what was edited."""
    is_all = len(first.samples) == len(samples)
    info = {
        name: asdict(entry if is_all else replace(entry, shape=(len(samples), *entry.shape[1:])))
        for name, entry in first.maps.info.items()
    }
    return {
        "trocar.model_id": first.maps.model_id,
        "trocar.expansions": json.dumps(first.maps.expansions),
        "trocar.info": json.dumps(info),
        "trocar.images": json.dumps([sample.name for sample in samples]),
        **({"trocar.edits": json.dumps([str(entry) for entry in edits])} if edits else {}),
    }


def _show_shapes(shapes: dict[str, tuple[int, ...]], out: Path) -> None:
    rows = table("feature map", "shape")
    for name, shape in shapes.items():
        rows.add_row(name, shape_text(shape))
    show(rows)
    typer.echo(f"wrote {out} ({size_text(out.stat().st_size)})")
