"""`trocar predict`: classes of images or texts by name, with scores."""

from typing import Annotated, Any

import typer

from trocar import Client, Predictions
from trocar._cli.console import number_text, show, show_json, table
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.choices import Activations
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import IMAGES_HELP, analysing, read_set
from trocar._cli.options.text_options import TextFile, TextsOption, read_texts
from trocar._request.inputs import with_flags
from trocar._request.texts import texts

Top = Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Number of classes for each sample.")]


def predict(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGES]...", help=IMAGES_HELP)] = None,
    *,
    text: TextsOption = None,
    text_file: TextFile = None,
    top: Top = 5,
    activation: Annotated[
        Activations,
        typer.Option(help="softmax: one class is right; sigmoid: several may be; none: the output as it is."),
    ] = Activations.SOFTMAX,
    edit: EditTexts = None,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the classes of images or texts by name, best first.

    Scores are probabilities: the softmax of the model's output over its classes.
    """
    edits, flags, sentences = parse_edits(edit), parse_flags(flag), read_texts(text, text_file)
    if bool(sentences) == bool(images):
        refuse("name either IMAGES or texts: --text TEXT or --text-file FILE")
    options: dict[str, Any] = {"top": top, "activation": activation.value, "edits": edits}
    if sentences:
        with analysing(batch):
            result = client.predict(
                model_id, with_flags(texts(sentences), flags), **options, batch_size=batch
            )
    else:
        samples = read_set(client, model_id, images or ())
        with analysing(batch, flags, **{model_id: samples}) as (inputs,):
            result = client.predict(model_id, inputs, **options)
    if as_json:
        show_json(result)
    else:
        _show(result)


def _show(outcome: Predictions) -> None:
    shown = table("sample", "class", "number", "score", right=("number", "score"))
    for prediction in outcome:
        for place, one in enumerate(prediction):
            name = "" if place else prediction.sample
            shown.add_row(name, one.name, str(one.number), number_text(one.score))
    show(shown)
