"""`trocar admin load` and `trocar admin unload`: models in the server's memory."""

from typing import Annotated

import typer

from trocar import Client
from trocar._base.tables import size_text
from trocar._cli.options.completion import complete_models

_LOAD_TIMEOUT_S = 600.0


def load(
    client: Client,
    model_id: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            autocompletion=complete_models,
            help="A model of the catalogue, or a torchvision model name.",
        ),
    ],
    weights: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="For a new model: DEFAULT, the name of a weights enum member, or random[:seed].",
        ),
    ] = "",
) -> None:
    """Load a model and wait until it can be used.

    A model that is loaded already is left alone. A download can take minutes.
    """
    model = client.load(model_id, weights, timeout_s=_LOAD_TIMEOUT_S)
    typer.echo(
        f"{model.model_id} is loaded on {model.device}: {model.weights}, "
        f"{model.parameter_count:,} parameters, {size_text(model.byte_count)}"
    )


def unload(
    client: Client,
    model_id: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
            help="A model of the catalogue.",
        ),
    ],
) -> None:
    """Remove a model from the server's memory.

    Waits for the calls that use it. The model stays in the catalogue, so that it can be loaded again.
    """
    model = client.unload(model_id)
    typer.echo(f"{model.model_id} is {model.state}")
