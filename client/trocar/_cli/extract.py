"""`trocar extract`: feature maps of many images into one file."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

import trocar
from trocar import Client
from trocar._cli.arguments import AsJson, BatchSize, Images, ModelId, Taps, parse_statistics
from trocar._cli.failures import refuse
from trocar._cli.feature_file import FeatureFile
from trocar._cli.merging import StatisticsTable, wanted_statistics
from trocar._cli.output import shape_text, show, show_json, size_text, table
from trocar._cli.passes import Pass, run_passes, samples_for, span
from trocar._cli.samples import Sample, batches
from trocar._cli.statistics_view import show_statistics

_SUFFIX = ".safetensors"


def extract(
    client: Client,
    model_id: ModelId,
    images: Images,
    tap: Taps,
    out: Annotated[Path, typer.Option(dir_okay=False, help="The .safetensors file to write.")],
    batch: BatchSize = 16,
    stats: Annotated[str, typer.Option(help="Print these as well, for example mean,std.")] = "",
    as_json: AsJson = False,
) -> None:
    """Save what modules compute on images to a file.

    One array for each feature map, with rows in the order of the images; their names are in the file's
    metadata, under trocar.images. Memory holds one batch at a time. The file appears when it is whole.
    """
    if out.suffix != _SUFFIX:
        refuse(f"--out: {out.name!r} must end in {_SUFFIX}")
    names = parse_statistics(stats)
    samples = samples_for(client, model_id, images)
    statistics = StatisticsTable(names)
    taps = [trocar.tap(selector, stats=wanted_statistics(names)) for selector in tap]
    is_one_batch = len(list(batches(samples, batch))) == 1
    with FeatureFile(out, sample_count=len(samples), is_one_batch=is_one_batch) as file:
        for one in run_passes(client, model_id, samples, taps, batch):
            file.append(
                one.maps,
                batch_size=len(one.samples),
                batch_name=span(one.samples),
                metadata=_metadata(one, samples),
            )
            statistics.add(one.maps)
    report = {
        "out": str(out),
        "image_count": len(samples),
        "shapes": file.shapes,
        "stats": statistics.values(),
    }
    if as_json:
        show_json(report)
        return
    _show_shapes(file.shapes, out)
    if names:
        show_statistics(statistics)


def _metadata(first: Pass, samples: list[Sample]) -> dict[str, str]:
    """Return what `FeatureMaps.save` writes, for all images, and their names."""
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
    }


def _show_shapes(shapes: dict[str, tuple[int, ...]], out: Path) -> None:
    rows = table("feature map", "shape")
    for name, shape in shapes.items():
        rows.add_row(name, shape_text(shape))
    show(rows)
    typer.echo(f"wrote {out} ({size_text(out.stat().st_size)})")
