"""`trocar analyse fid`: the Frechet distance between two sets of images."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import analysing, read_set


def fid(
    client: Client,
    model_id: ModelId,
    folder_a: Annotated[
        str, typer.Argument(metavar="FOLDER_A", help="A folder of images, a quoted pattern or a .npy file.")
    ],
    folder_b: Annotated[
        str, typer.Argument(metavar="FOLDER_B", help="The set to compare with, given as FOLDER_A.")
    ],
    at: Annotated[
        str,
        typer.Option(
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Module whose output gives the features; positions are averaged.",
        ),
    ] = "avgpool",
    *,
    flag: FlagTexts = None,
    batch: BatchSize = 32,
    as_json: AsJson = False,
) -> None:
    """Print the Frechet distance (FID) between two sets of images.

    Distances are comparable for one model, one module and one size of set.
    """
    flags = parse_flags(flag)
    left, right = read_set(client, model_id, [folder_a]), read_set(client, model_id, [folder_b])
    with analysing(batch, flags, **{f"A {folder_a}": left, f"B {folder_b}": right}) as (images_a, images_b):
        result = client.fid(model_id, images_a, images_b, at)
    if as_json:
        show_json(result)
        return
    show_report(result)
