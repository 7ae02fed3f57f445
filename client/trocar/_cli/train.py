"""`trocar train`: fine-tune a hosted model on data of this machine."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer

import trocar
from trocar import Client
from trocar._cli.arguments import ModelId
from trocar._cli.failures import refuse
from trocar._cli.output import number_text, size_text
from trocar._fit_progress import summary
from trocar._history import FitEvent, History
from trocar._trainer_optimizers import Optimizer
from trocar._trainer_parts import GradientRule, SavedTensors

OPTIMIZERS = {
    "sgd": trocar.sgd,
    "adam": trocar.adam,
    "adamw": trocar.adamw,
    "rmsprop": trocar.rmsprop,
    "adagrad": trocar.adagrad,
}
_BINARY = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_UNITS = {**_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


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
    """Fine-tune a model on the server; it goes on when this command is stopped, see `trocar trainers`."""
    options = _options(optimizer, lr, weight_decay)
    rules, saved = [_clamp(text) for text in clamp or ()], None if spool is None else _spool(spool)
    trainer = client.train(
        model_id,
        head=head,
        trainable=trainable or (),
        optimizer=options,
        gradient_rules=rules,
        saved_tensors=saved,
        accumulation=accumulation,
        precision="bf16" if bf16 else "float32",
        ema_decay=ema,
        seed=seed,
    )
    typer.echo(str(trainer.info()), err=True)
    try:
        found = trainer.fit(
            _source(data),
            epochs=epochs,
            batch_size=batch,
            eval=None if evaluate is None else _source(evaluate),
            metrics=metric or ["accuracy"],
            augment=augment or (),
            early_stop=None if early_stop is None else trocar.early_stop(patience=early_stop),
            on_event=tell,
        )
        _finish(trainer, found, publish, export, history)
    finally:
        if not keep:
            trainer.close()
    if keep:
        typer.echo(f"trainer {trainer.trainer_id}")


def _finish(
    trainer: trocar.Trainer, found: History, publish: str | None, export: Path | None, history: Path | None
) -> None:
    if history is not None:
        found.save(history)
        typer.echo(f"wrote {history}")
    if export is not None:
        path = trainer.export(export)
        typer.echo(f"wrote {path} ({size_text(path.stat().st_size)})")
    if publish is not None:
        typer.echo(f"published {trainer.publish(publish)}")


def tell(event: FitEvent) -> None:
    """Write a line for what stays on the screen."""
    if event.kind == "evaluation":
        typer.echo(f"epoch {event['epoch'] + 1}: {summary(event)}")
    elif event.kind == "epoch" and event.get("loss") is not None:
        typer.echo(f"epoch {event['epoch'] + 1}: loss {number_text(float(event['loss']))}")
    elif event.get("message"):
        typer.echo(str(event["message"]), err=True)


def _source(text: str) -> Any:
    """Return a folder, or else what must be the id of a data set."""
    path = Path(text)
    return path if path.exists() else text


def _options(name: str, lr: float | None, weight_decay: float | None) -> Optimizer:
    make = OPTIMIZERS.get(name)
    if make is None:
        refuse(f"--optimizer: no optimizer {name!r}; there is {', '.join(OPTIMIZERS)}")
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    return make(**given) if weight_decay is None else make(**given, weight_decay=weight_decay)


def _clamp(text: str) -> GradientRule:
    selector, separator, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        if not (separator and colon and selector):
            raise ValueError
        return trocar.clamp(selector, float(low), float(high))
    except ValueError:
        refuse(f"--clamp: {text!r} does not look like 'fc.*=-0.1:0.1'")


def _spool(text: str) -> SavedTensors:
    return trocar.spool(budget_bytes=parse_size(text, "--spool"))


def parse_size(text: str, option: str) -> int:
    """Read `256MiB`, `1.5GB` or a number of bytes.

    Raises:
        typer.BadParameter: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        refuse(f"{option}: {text!r} is no size; write for example 256MiB")
    return int(float(match[1]) * unit)
