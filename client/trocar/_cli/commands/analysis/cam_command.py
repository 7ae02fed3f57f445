"""`trocar cam`: class activation maps of an image, as a picture."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trocar import Attribution, Client
from trocar._base.names import unknown_name
from trocar._cli.console import number_text, show, show_json, table
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.choices import CamMethod
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.input_sets import ImagesOrFolders, analysing, check_plot, read_set
from trocar._request.scores import logit

if TYPE_CHECKING:
    from trocar._attribution.heat_map_pictures import Panel
    from trocar._cli.options.samples import InputSample
    from trocar._request.objectives import Objective

_SHOWN_NAMES = 8
_MOST_PANELS = 64
"""Images that one picture holds."""


def cam(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    out: Annotated[
        Path,
        typer.Option(
            metavar="PATH", help="A picture file, for example cam.png, or a folder for one picture per image."
        ),
    ],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Module. Default: the last feature map before the pooling for CAM methods, the "
            "input for others.",
        ),
    ] = None,
    class_: Annotated[
        str | None,
        typer.Option("--class", metavar="CLASS", help="Class number or name. Default: the predicted class."),
    ] = None,
    method: Annotated[
        CamMethod, typer.Option(metavar="METHOD", help=f"One of {', '.join(CamMethod)}.")
    ] = CamMethod.GRAD_CAM,
    option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Option of the method, for example steps=100, window=32, channel_dim=-1; repeat for more.",
        ),
    ] = None,
    alpha: Annotated[
        float, typer.Option(metavar="OPACITY", min=0, max=1, help="Opacity of the heat map, 0 to 1.")
    ] = 0.5,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Draw class activation maps (Grad-CAM and others) over images.

    Several images become a grid in one picture or, with a folder as --out, one picture each.
    """
    is_folder = out.is_dir() or not out.suffix
    check_plot(out / "x.png" if out.is_dir() else out.with_suffix(".png") if is_folder else out, "--out")
    name = method.value.replace("++", "_plus_plus")
    samples = read_set(client, model_id, images)
    if not is_folder and len(samples) > _MOST_PANELS:
        refuse(f"--out: {len(samples)} images need a folder, not one picture file")
    if not is_folder and out.resolve() in _files(samples):
        refuse(f"--out: {str(out)!r} is one of the images; give another name")
    asked = {
        "of": _objective(client, model_id, class_),
        "at": at,
        "batch_size": batch,
        **_options(option or []),
    }
    rows: list[dict[str, Any]] = []
    panels: list[Panel] = []
    place = title = ""
    for result, sample, position in _attributed(client, model_id, samples, name, batch, asked):
        rows.append(_row(sample, result, position))
        panels.append(_panel(result, sample, position))
        place, title = result.at, result.title
    written = _write(out, samples, panels, title, alpha, is_folder=is_folder)
    if as_json:
        show_json({"model_id": model_id, "method": name, "at": place, "out": written, "images": rows})
        return
    _show(rows, written, title)


def _attributed(
    client: Client,
    model_id: str,
    samples: Sequence[InputSample],
    method: str,
    batch: int,
    asked: dict[str, Any],
) -> Iterator[tuple[Attribution, InputSample, int]]:
    """Yield each sample with the attribution of its batch and its position in it."""
    done = 0
    with analysing(batch, **{model_id: samples}) as (batches,):
        for index, values in enumerate(batches):
            try:
                result = client.attribute(model_id, values, method, **asked)
            except Exception as error:
                error.add_note(f"in {batches.label(index)}")
                raise
            for position in range(len(values)):
                yield result, samples[done + position], position
            done += len(values)


def _panel(outcome: Attribution, sample: InputSample, position: int) -> Panel:
    from trocar._attribution.heat_map_pictures import panel  # needs matplotlib, which is an extra

    return panel(outcome, position, title=Path(sample.name).name)


def _write(
    out: Path,
    samples: Sequence[InputSample],
    panels: Sequence[Panel],
    title: str,
    alpha: float,
    *,
    is_folder: bool,
) -> list[str]:
    from trocar._attribution.heat_map_pictures import draw  # needs matplotlib, which is an extra
    from trocar._base.figures import save_figure

    if not is_folder:
        save_figure(draw(panels, title, alpha), out, dpi=120)
        return [str(out)]
    out.mkdir(exist_ok=True)
    written: list[str] = []
    kept = _files(samples)
    for sample, one in zip(samples, panels, strict=True):
        stem = Path(sample.name).stem if isinstance(sample.value, Path) else Path(sample.name).name
        path, count = out / f"{stem}.png", 2
        while str(path) in written or path.resolve() in kept:
            path, count = out / f"{stem}-{count}.png", count + 1
        save_figure(draw([one], title, alpha), path, dpi=120)
        written.append(str(path))
    return written


def _files(samples: Sequence[InputSample]) -> set[Path]:
    """Return the files of images, on which no picture is written."""
    return {sample.value.resolve() for sample in samples if isinstance(sample.value, Path)}


def _objective(client: Client, model_id: str, wanted: str | None) -> Objective | None:
    """Read `--class`.

    Raises:
        typer.BadParameter: No class, or several, have the name.
    """
    if wanted is None:
        return None
    if wanted.isdecimal():
        return logit(int(wanted))
    if wanted.removeprefix("-").isdecimal():
        refuse(f"--class: no class {wanted}; they are numbered from 0")
    categories = client.model(model_id).categories
    numbers = [number for number, name in enumerate(categories) if name.casefold() == wanted.casefold()]
    if len(numbers) > 1:
        refuse(f"--class: {wanted!r} is the name of {', '.join(map(str, numbers))}; give a number")
    if not categories:
        refuse(f"--class: the classes of {model_id} have no names; give a number")
    if not numbers:
        refuse(f"--class: {_no_class(wanted, categories)}")
    return logit(numbers[0])


def _no_class(wanted: str, categories: Sequence[str]) -> str:
    near = [name for name in categories if wanted.casefold() in name.casefold()]
    if near:
        return f"no class {wanted!r}; in the names of: {', '.join(near[:_SHOWN_NAMES])}"
    return str(unknown_name("class", wanted, categories).args[0])


def _options(texts: Sequence[str]) -> dict[str, Any]:
    """Read `steps=100`; values are JSON, or else text."""
    options = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or not name.isidentifier() or name in ("of", "at", "batch_size", "method"):
            refuse(f"--option: {text!r} is not NAME=VALUE; write for example steps=100")
        try:
            read = json.loads(value)
        except ValueError:
            read = value
        options[name] = tuple(read) if isinstance(read, list) else read
    return options


def _row(sample: InputSample, outcome: Attribution, position: int) -> dict[str, Any]:
    return {
        "image": sample.name,
        "class": None if outcome.classes is None else outcome.classes[position],
        "name": outcome.class_names[position] if outcome.class_names else "",
        "score": None if outcome.scores is None else float(outcome.scores[position]),
    }


def _show(rows: Sequence[dict[str, Any]], written: Sequence[str], title: str) -> None:
    shown = table("image", "class", "name", "score", right=("class", "score"))
    for row in rows:
        score = "" if row["score"] is None else number_text(row["score"])
        shown.add_row(row["image"], str(row["class"]), row["name"], score)
    show(shown)
    typer.echo(title)
    typer.echo(
        f"wrote {written[0]}" if len(written) == 1 else f"wrote {len(written)} pictures, {written[0]} first"
    )
