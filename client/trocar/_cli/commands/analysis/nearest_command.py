"""`trocar analyse nearest`: the images or texts of a set that are nearest to others."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.choices import MetricChoice
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import IMAGES_HELP, Plot, analysing, check_plot, read_set
from trocar._cli.options.tables import TableFile, check_table
from trocar._cli.options.text_options import TextFile, TextsOption, read_texts
from trocar._request.inputs import with_flags
from trocar._request.texts import texts


def nearest(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    *,
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGES]...", help=IMAGES_HELP)] = None,
    query: Annotated[
        list[Path] | None,
        typer.Option(metavar="IMAGE", help="Image or .npy file to compare with; repeat for more."),
    ] = None,
    text: TextsOption = None,
    text_file: TextFile = None,
    query_text: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Text to compare with; repeat for more."),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            metavar="SELECTOR", autocompletion=complete_modules, help="Place of the features to compare."
        ),
    ] = "avgpool",
    k: Annotated[int, typer.Option("-k", metavar="NUMBER", min=1, help="Rows for each query.")] = 5,
    metric: Annotated[MetricChoice, typer.Option(help="How features are compared.")] = MetricChoice.COSINE,
    plot: Plot = None,
    out: TableFile = None,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the images or texts of a set that are nearest to a query in their features.

    Positions are averaged. What is in the set is its own neighbour.
    """
    check_plot(plot)
    check_table(out)
    flags, sentences = parse_flags(flag), read_texts(text, text_file)
    if bool(images) == bool(sentences) or bool(images) != bool(query) or bool(sentences) != bool(query_text):
        refuse("name either IMAGES and --query, or texts (--text or --text-file) and --query-text")
    with _sets(client, model_id, (images, query), (sentences, query_text), flags, batch) as (inputs, queries):
        near = client.nearest(model_id, inputs, at, queries, k, metric=metric.value)
    if as_json:
        show_json(
            [
                {"query": name, "neighbours": [asdict(one) for one in row]}
                for name, row in zip(near.queries, near, strict=True)
            ]
        )
    else:
        show_report(near)
    if plot:
        near.plot(plot)
    if out:
        near.save(out)


@contextmanager
def _sets(
    client: Client,
    model_id: str,
    images: tuple[list[str] | None, list[Path] | None],
    sentences: tuple[list[str], list[str] | None],
    flags: Mapping[str, Any],
    batch: int,
) -> Iterator[list[Any]]:
    """Yield what is searched, and what is looked for: images, or texts."""
    pairs = zip((model_id, "query"), images, strict=True) if images[0] else ()
    sets = {name: read_set(client, model_id, each or []) for name, each in pairs}
    with analysing(batch, flags, **sets) as inputs:
        yield inputs or [with_flags(texts(each or ()), flags) for each in sentences]
