"""`trocar fid`: the Frechet distance between two sets of images."""

from pathlib import Path
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson, BatchSize, ModelId
from trocar._cli.input_sets import analysing, read_set
from trocar._cli.output import show_json


def fid(
    client: Client,
    model_id: ModelId,
    folder_a: Annotated[
        Path, typer.Argument(metavar="FOLDER_A", exists=True, help="A folder of images, or a .npy file.")
    ],
    folder_b: Annotated[
        Path, typer.Argument(metavar="FOLDER_B", exists=True, help="The set to compare it with.")
    ],
    at: Annotated[
        str, typer.Option(help="Where the features are taken; positions are averaged.")
    ] = "avgpool",
    batch: BatchSize = 32,
    as_json: AsJson = False,
) -> None:
    """Print the Frechet distance (FID) between two sets of images.

    Between their features in a model. Distances compare for one model, one place and one size of set.
    """
    left, right = read_set(client, model_id, [folder_a]), read_set(client, model_id, [folder_b])
    with analysing(batch, **{f"A {folder_a}": left, f"B {folder_b}": right}) as (images_a, images_b):
        result = client.fid(model_id, images_a, images_b, at)
    if as_json:
        show_json(result)
        return
    typer.echo(str(result))
