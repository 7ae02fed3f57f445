"""`trocar extract`: feature maps of many samples into one file, or of a data set into a folder."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._base.call_options import CallOptions, Numerics
from trocar._base.replacement import FILE_SUFFIXES
from trocar._base.tables import size_text
from trocar._cli.console import shape_text, show, show_json, table
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import (
    AsJson,
    BatchSize,
    ModelId,
    Taps,
    check_file,
    parse_statistics,
    statistics_taps,
)
from trocar._cli.options.choices import Decode, Format, OnError
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import (
    AdapterOption,
    FlagTexts,
    NumericsOption,
    parse_flags,
    wire_numerics,
)
from trocar._cli.options.one_pass import EditSources, EditSourceTexts, read_edit_sources, read_pass
from trocar._cli.options.samples import InputSample, is_one_batch
from trocar._cli.options.text_options import TextFile, TextsOption, read_texts
from trocar._cli.runs.call_clock import CallClock
from trocar._cli.runs.dataset_run import expanded, run_dataset
from trocar._cli.runs.feature_file import FeatureFile
from trocar._cli.runs.pass_run import Pass, run_passes, samples_for, span
from trocar._cli.runs.statistics_view import StatisticsTable, show_statistics
from trocar._export.options import MAX_SHARD_SIZE
from trocar._request.edits import Edit
from trocar._request.inputs import with_flags
from trocar._request.statistic_options import StatisticName
from trocar._request.texts import Texts, texts
from trocar._sources.files import SERVER_SUFFIXES, SOUND_SUFFIXES, TEXT_SUFFIXES, list_samples
from trocar._sources.source_opening import kind_of

_SUFFIX = ".safetensors"
_NOT_IMAGES = frozenset(("input_ids", "input_values", "input_features"))
"""Inputs of models that take texts or sound."""


def extract(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    *,
    source: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="Files of images, sound or texts, folders of these, quoted patterns such as 'photos/*.jpg', "
            ".csv, .jsonl and .parquet tables of texts, WebDataset .tar shards, .npy files, "
            "torch:module:name, hf:name:split:column.",
        ),
    ] = None,
    tap: Taps,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="A .safetensors file, or a folder of shards; an interrupted run resumes."
        ),
    ],
    text: TextsOption = None,
    text_file: TextFile = None,
    column: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Column of texts in a table or dataset; two of pairs with a comma between."
        ),
    ] = "",
    max_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER",
            min=1,
            max=(1 << 31) - 1,
            help="Most tokens of one text; otherwise the model's maximum.",
        ),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="Cut longer texts; otherwise they fail.")
    ] = False,
    batch: BatchSize = 16,
    format: Annotated[Format, typer.Option(help="Format of the shards in a folder.")] = Format.SAFETENSORS,
    shard_size: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, max=MAX_SHARD_SIZE, help="Maximum samples per shard.")
    ] = 10_000,
    decode: Annotated[
        Decode, typer.Option(help="Decode images on the server or the client.")
    ] = Decode.SERVER,
    on_error: Annotated[
        OnError, typer.Option(help="What to do if a sample fails; skip lists it in the manifest.")
    ] = OnError.STOP,
    limit: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=1, help="Use only the first N samples.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Delete the contents of the folder and start again.")
    ] = False,
    stats: Annotated[
        str, typer.Option(metavar="NAMES", help="Also print these statistics, for example mean,std.")
    ] = "",
    edit: EditTexts = None,
    edit_source: EditSources = None,
    edit_source_text: EditSourceTexts = None,
    timing: Annotated[bool, typer.Option("--timing", help="Print how long each part took.")] = False,
    numerics: NumericsOption = None,
    adapter: AdapterOption = "",
    flag: FlagTexts = None,
    ray: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Read and send on the nodes of a Ray cluster: auto, host:port or local."
        ),
    ] = "",
    workers: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="With --ray: processes that read and send.")
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Save the outputs of modules on images or a data set.

    Into a folder: shards and a manifest. The same command resumes a stopped one, and the files equal
    those of an uninterrupted run. Into one .safetensors file: it appears when complete.
    Rows are in the order of the source. Memory holds a few batches at a time. Values of tokens are written
    without padding. Into one .safetensors file texts, and images with --edit-source, go in one batch.
    """
    names, edits, flags = parse_statistics(stats), parse_edits(edit), parse_flags(flag)
    options = _PassOptions(edits, wire_numerics(numerics), adapter, flags)
    sentences = read_texts(text, text_file)
    if bool(sentences) == bool(source):
        refuse("name either SOURCE or texts: --text TEXT or --text-file FILE")
    is_file, is_one_batch = out.suffix == _SUFFIX, bool(sentences or edit_source or edit_source_text)
    if ray and is_file:
        refuse("--ray needs a folder: --out FOLDER")
    if is_one_batch and (names or timing):
        refuse("--stats and --timing take neither texts nor --edit-source")
    if is_file:
        check_file(out, _SUFFIX)
        if column or ((truncate or max_tokens) and not sentences):
            refuse("--column, --max-tokens and --truncate of files need a folder: --out FOLDER")
        is_plain = (format, decode, on_error) == (Format.SAFETENSORS, Decode.SERVER, OnError.STOP)
        if not is_plain or restart:
            refuse("--format, --decode, --on-error and --restart need a folder: --out FOLDER")
    if is_one_batch and is_file:
        sources = read_edit_sources(client, model_id, edit_source, edit_source_text)
        inputs: Any
        if sentences:
            inputs = texts(sentences[:limit], max_tokens=max_tokens, truncate=truncate)
        else:
            inputs = read_pass(client, model_id, _paths(client, model_id, source or []), limit)
        _extract_one_batch(client, model_id, inputs, sources, tap, out, options, as_json=as_json)
        return
    if is_file:
        assert source is not None
        samples = samples_for(client, model_id, _paths(client, model_id, source))[:limit]
        clock = CallClock() if timing else None
        _extract_to_file(
            client,
            model_id,
            samples,
            tap,
            out,
            batch,
            names,
            options,
            as_json=as_json,
            clock=clock,
        )
        return
    _check_folder(
        out, {"--timing": timing, "--edit-source": edit_source or edit_source_text, "--stats": names}
    )
    run_dataset(
        client,
        model_id,
        texts(sentences) if sentences else expanded(source or []),
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
        adapter=adapter,
        flags=flags,
        column=column,
        max_tokens=max_tokens,
        truncate=truncate,
        ray=ray,
        workers=workers,
    )


def _check_folder(out: Path, for_files: dict[str, object]) -> None:
    """Refuse an output folder that is the name of a file, and options that only files have."""
    if out.suffix in FILE_SUFFIXES or out.is_file():
        refuse(f"--out: {out.name!r} must end in {_SUFFIX}, or be a folder (with --format)")
    for option, value in for_files.items():
        if value:
            more = "; `trocar stats` takes the same images" if option == "--stats" else ""
            refuse(f"{option} needs --out FILE.safetensors{more}")


@dataclass(frozen=True)
class _PassOptions:
    """Options of every pass."""

    edits: list[Edit | str]
    numerics: Numerics | None
    adapter: str
    flags: dict[str, bool | int | str]


def _extract_one_batch(
    client: Client,
    model_id: str,
    inputs: Any,
    sources: dict[str, Any],
    taps: list[str],
    out: Path,
    options: _PassOptions,
    *,
    as_json: bool,
) -> None:
    maps = client.extract(
        model_id,
        with_flags(inputs, options.flags),
        taps,
        edits=options.edits,
        sources=sources or None,
        options=CallOptions(numerics=options.numerics),
        adapter=options.adapter,
    )
    maps.save(out)
    shapes = {name: values.shape for name, values in maps.items()}
    if as_json:
        counts = {"token_counts": maps.tokens.lengths} if isinstance(inputs, Texts) else {}
        show_json({"out": str(out), **counts, "shapes": shapes})
        return
    _show_shapes(shapes, out)


def _paths(client: Client, model_id: str, sources: list[str]) -> list[Path]:
    """List the files of a run into one file.

    Raises:
        typer.BadParameter: A source does not exist, the model does not take it, or it needs a folder.
        SourceError: A folder has no image.
        UnknownModelError: There are texts or sound, and no such model.
    """
    paths: list[Path] = []
    for source in expanded(sources):
        kind = kind_of(source)
        result = list_samples(Path(source), SERVER_SUFFIXES)[0] if kind == "folder" else [Path(source)]
        if kind in ("file", "folder") and result[0].suffix.lower() in SOUND_SUFFIXES | TEXT_SUFFIXES:
            _check_kind(client, model_id, str(result[0]))
            refuse(f"{source}: samples differ in length, so --out must be a folder")
        if kind not in ("file", "array", "folder"):
            refuse(f"{source}: the number of samples is unknown, so --out must be a folder")
        paths += result
    return paths


def _check_kind(client: Client, model_id: str, source: str) -> None:
    """Refuse a text or sound for a model that takes images.

    Raises:
        typer.BadParameter: The model takes images alone.
    """
    model = client.model(model_id)
    if model.preprocessing is not None and not {each.name for each in model.inputs} & _NOT_IMAGES:
        what = "sound" if Path(source).suffix.lower() in SOUND_SUFFIXES else "a text"
        refuse(f"{source} is {what}, and {model_id} takes images")


def _extract_to_file(  # noqa: PLR0913 - the options that a file has
    client: Client,
    model_id: str,
    samples: list[InputSample],
    selectors: list[str],
    out: Path,
    batch: int,
    names: tuple[StatisticName, ...],
    options: _PassOptions,
    *,
    as_json: bool,
    clock: CallClock | None,
) -> None:
    statistics = StatisticsTable(names)
    taps = statistics_taps(selectors, names, values=True)
    is_whole = is_one_batch(samples, batch)
    with FeatureFile(out, sample_count=len(samples), is_one_batch=is_whole) as file:
        for one in run_passes(
            client,
            model_id,
            samples,
            taps,
            batch,
            statistics,
            options.edits,
            options.numerics,
            adapter=options.adapter,
            flags=options.flags,
        ):
            if clock is not None:
                clock.add(one.maps)
            file.append(
                one.maps,
                batch_size=len(one.samples),
                batch_name=span(one.samples),
                metadata=_metadata(one, samples, options.edits),
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


def _metadata(first: Pass, samples: list[InputSample], edits: list[Edit | str]) -> dict[str, str]:
    """Return the metadata of `FeatureMaps.save`, for all images, their names, and edits."""
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
