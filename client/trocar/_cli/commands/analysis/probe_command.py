"""`trocar probe`: a direction at each of many places, fitted on the server."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._analysis.analysis_inputs import images_in
from trocar._cli.console import show_json, show_report
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.input_sets import Plot, check_plot
from trocar._request.stored.direction_fits import KINDS
from trocar._request.text_positions import positions
from trocar_api.value_words import not_one_of

_TEXTS = ".txt"


def probe(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    classes: Annotated[
        list[Path],
        typer.Argument(
            metavar="CLASS...",
            help="A folder of images or a .txt file with one text a line, for each class; or one folder with "
            "a folder for each class.",
        ),
    ],
    *,
    tap: Annotated[
        list[str] | None,
        typer.Option(
            "--tap",
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Places to fit at, all blocks by default; repeat for more.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the directions on the server.")
    ] = None,
    kind: Annotated[str, typer.Option(metavar="KIND", help="logistic or mean_difference.")] = "logistic",
    folds: Annotated[int, typer.Option(metavar="COUNT", min=0, help="Folds for the scores; 0 for none.")] = 5,
    last: Annotated[
        bool, typer.Option("--last", help="Take the last token of each text instead of the mean over all.")
    ] = False,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace stored directions of this name.")
    ] = False,
    plot: Plot = None,
    batch: BatchSize = 32,
    as_json: AsJson = False,
) -> None:
    """Fit a direction between classes at each block, and print how well it tells them apart."""
    check_plot(plot)
    if kind not in KINDS or kind in ("ridge", "pca", "given"):
        refuse(f"--kind {not_one_of(kind, ('logistic', 'mean_difference'))}")
    data, labels = _samples(classes)
    result = client.fit_direction(
        model_id,
        data,
        labels,
        tap or ["layer[*]"],
        name=name,
        kind="logistic" if kind == "logistic" else "mean_difference",
        folds=folds,
        positions=positions(prompt=[-1]) if last else None,
        replace=replace,
        batch_size=batch,
    )
    if as_json:
        show_json([_row(each) for each in result])
    else:
        show_report(result)
    if plot:
        result.plot(plot)


def _samples(classes: Sequence[Path]) -> tuple[list[Any], list[str]]:
    """Return the samples of all classes, and the class of each."""
    if len(classes) == 1 and classes[0].is_dir():
        classes = sorted(entry for entry in classes[0].iterdir() if entry.is_dir())
    if len(classes) < 2:
        refuse("give a folder or a .txt file for each of two classes, or one folder with a folder for each")
    data: list[Any] = []
    labels: list[str] = []
    for entry in classes:
        samples = _of_class(entry)
        data += samples
        labels += [entry.stem] * len(samples)
    return data, labels


def _of_class(entry: Path) -> Sequence[Any]:
    if entry.is_dir():
        return images_in(entry)
    if entry.suffix != _TEXTS:
        refuse(f"{entry} is neither a folder of images nor a .txt file with one text a line")
    return [line for line in entry.read_text("utf-8").splitlines() if line.strip()]


def _row(stored: Any) -> dict[str, Any]:
    return {
        "name": stored.name,
        "place": stored.place,
        "score_name": stored.score_name,
        "score": stored.score,
        "fold_scores": stored.fold_scores,
        "auc": stored.auc,
        "mean_norm": stored.mean_norm,
        "digest": stored.digest,
    }
