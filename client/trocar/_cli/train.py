"""`trocar train`: fine-tune a hosted model on data of this machine."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

import trocar
from trocar import Client
from trocar._cli.arguments import ModelId
from trocar._cli.failures import refuse
from trocar._cli.fits import Results, allowed_values, closed_unless_begun, follow
from trocar._cli.sizes import parse_size
from trocar._cli.uploading import bars, check_data, stored
from trocar._stored_datasets import StoredDataset
from trocar._trainer_optimizers import Optimizer
from trocar._trainer_parts import GradientRule

OPTIMIZERS = {
    "sgd": trocar.sgd,
    "adam": trocar.adam,
    "adamw": trocar.adamw,
    "rmsprop": trocar.rmsprop,
    "adagrad": trocar.adagrad,
}


def train(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA", help="A folder with a folder of images for each class, or the id of a data set."
        ),
    ],
    *,
    head: Annotated[int | None, typer.Option(min=1, help="A new classifier with this many classes.")] = None,
    trainable: Annotated[
        list[str] | None,
        typer.Option(help="What is trained beside a new head: layer4 fc. Everything when not given."),
    ] = None,
    clamp: Annotated[
        list[str] | None, typer.Option(help="Clamp gradients: 'fc.*=-0.1:0.1'.", metavar="WHERE=LOW:HIGH")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=f"One of {', '.join(OPTIMIZERS)}.")] = "adamw",
    lr: Annotated[float | None, typer.Option(help="Learning rate; the optimizer's usual one.")] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0, help="Of the optimizer.")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times over the data.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images in a batch.")] = 32,
    evaluate: Annotated[
        str | None, typer.Option("--eval", help="What to evaluate on after each epoch, as DATA.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="accuracy, f1, auroc, top_k, ...")] = None,
    augment: Annotated[
        list[str] | None, typer.Option(help="torchvision's v2 transforms, for example RandomHorizontalFlip.")
    ] = None,
    spool: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Keep saved tensors in this much memory: 256MiB.")
    ] = None,
    early_stop: Annotated[
        int | None, typer.Option(min=1, help="End when so many evaluations in a row are no better.")
    ] = None,
    ema: Annotated[float | None, typer.Option(help="Decay of a moving average of the weights.")] = None,
    accumulation: Annotated[int, typer.Option(min=1, help="Batches for each update.")] = 1,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 where that is safe.")] = False,
    seed: Annotated[int, typer.Option(help="Of the head and of the order of the data.")] = 0,
    publish: Annotated[
        str | None, typer.Option(metavar="ID", help="Make the result a hosted model of this id.")
    ] = None,
    export: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Save the weights to a .safetensors file.")
    ] = None,
    history: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Save what happened, one line of JSON for each event.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not close the trainer at the end.")] = False,
) -> None:
    """Fine-tune a model on the server.

    The fit is the server's: it goes on when this command is stopped. `trocar trainers watch` follows it then.
    """
    rules = [_clamp(text) for text in clamp or ()]
    saved = None if spool is None else trocar.spool(budget_bytes=parse_size(spool, "--spool"))
    made = _optimizer(optimizer, lr, weight_decay)
    check_data(client, data, "DATA")
    if evaluate is not None:
        check_data(client, evaluate, "--eval")
    results = Results(publish, export, history)
    results.check(client)
    with allowed_values():
        trainer = client.train(
            model_id,
            head=head,
            trainable=trainable or (),
            optimizer=made,
            gradient_rules=rules,
            saved_tensors=saved,
            accumulation=accumulation,
            precision="bf16" if bf16 else "float32",
            ema_decay=ema,
            seed=seed,
        )
    typer.echo(str(trainer.info()), err=True)
    with closed_unless_begun(trainer), bars() as shown:
        dataset = stored(client, data, shown)
        compared = None if evaluate is None else stored(client, evaluate, shown)
        first = trainer.start_fit(
            dataset,
            epochs=epochs,
            batch_size=batch,
            eval=compared,
            metrics=metric or ["accuracy"],
            augment=augment or (),
            early_stop=None if early_stop is None else trocar.early_stop(patience=early_stop),
        )
    follow(trainer, first, results)
    results.keep(trainer, _categories(client, dataset, head))
    if keep:
        typer.echo(f"trainer {trainer.trainer_id}")
    else:
        trainer.close()


def _categories(client: Client, dataset: StoredDataset, head: int | None) -> tuple[str, ...]:
    """Return the names of the classes of a new head, where the data set has them."""
    names = client.dataset(dataset.dataset_id).categories
    return names if head == len(names) else ()


def _optimizer(name: str, lr: float | None, weight_decay: float | None) -> Optimizer:
    make = OPTIMIZERS.get(name)
    if make is None:
        refuse(f"--optimizer: no optimizer {name!r}; there is {', '.join(OPTIMIZERS)}")
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    return make(**given) if weight_decay is None else make(**given, weight_decay=weight_decay)


def _clamp(text: str) -> GradientRule:
    selector, _, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        found = [None if end == "" else float(end) for end in (low, high)]
    except ValueError:
        found = []
    numbers = [end for end in found if end is not None]
    if not (selector and colon and numbers and all(map(math.isfinite, numbers))):
        refuse(f"--clamp: {text!r} does not look like 'fc.*=-0.1:0.1'; one of the two may be left away")
    if numbers != sorted(numbers):
        refuse(f"--clamp: {text!r} has its limits the wrong way round; write LOW:HIGH")
    return trocar.clamp(selector, *found)
