"""`trocar train`: fine-tuning of a hosted model on data of this machine."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

import trocar
from trocar import Client
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, ModelId
from trocar._cli.runs.fit_outcome import end, uses_of
from trocar._cli.runs.fit_run import Results, allowed_values, closed_unless_begun, follow
from trocar._cli.runs.uploading import bars, check_data, stored
from trocar._request.training.trainer_optimizers import Optimizer
from trocar._request.training.trainer_parts import GradientEdit
from trocar._wire.stored_datasets import StoredDataset
from trocar_api.byte_sizes import byte_count
from trocar_api.value_words import not_one_of

EVAL_SPLIT = 0.1
"""The share of a data set of classes that is evaluated unless something else is said."""
OPTIMIZERS = {
    "sgd": trocar.training.sgd,
    "adam": trocar.training.adam,
    "adamw": trocar.training.adamw,
    "rmsprop": trocar.training.rmsprop,
    "adagrad": trocar.training.adagrad,
}


def train(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    data: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="A folder with a folder of images, sound or texts for each class, or the id of a data set.",
        ),
    ],
    *,
    head: Annotated[
        int | None,
        typer.Option(metavar="NUMBER", min=1, help="Replace the classifier by one with this many classes."),
    ] = None,
    trainable: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARAMETERS",
            help="Parameters to train beside a new head, for example layer4 fc. Default: all.",
        ),
    ] = None,
    clamp: Annotated[
        list[str] | None, typer.Option(help="Clamp gradients: 'fc.*=-0.1:0.1'.", metavar="WHERE=LOW:HIGH")
    ] = None,
    optimizer: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(OPTIMIZERS)}.")
    ] = "adamw",
    lr: Annotated[
        float | None, typer.Option(metavar="RATE", help="Learning rate. Default: the optimizer's.")
    ] = None,
    weight_decay: Annotated[
        float | None, typer.Option(metavar="VALUE", min=0, help="Weight decay of the optimizer.")
    ] = None,
    epochs: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Number of passes over the data.")] = 1,
    batch: Annotated[int, typer.Option(metavar="NUMBER", min=1, help="Images per batch.")] = 32,
    evaluate: Annotated[
        str | None,
        typer.Option("--eval", metavar="DATA", help="Data to evaluate on after each epoch, given as DATA."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option(metavar="METRIC", help="accuracy, f1, auroc, top_k, ...")
    ] = None,
    eval_split: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=0.9,
            help="Share of DATA to evaluate on instead of training on it; 0 for none. "
            "Default: 0.1 where labels are whole numbers and there is no --eval.",
        ),
    ] = None,
    augment: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRANSFORM", help="torchvision's v2 transforms, for example RandomHorizontalFlip."
        ),
    ] = None,
    spool: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory for saved tensors, the rest goes to disk: 256MiB."),
    ] = None,
    early_stop: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", min=1, help="Stop after this many evaluations in a row without improvement."
        ),
    ] = None,
    ema: Annotated[
        float | None, typer.Option(metavar="DECAY", help="Decay of a moving average of the weights.")
    ] = None,
    accumulation: Annotated[
        int, typer.Option(metavar="NUMBER", min=1, help="Batches per update (gradient accumulation).")
    ] = 1,
    workers: Annotated[
        int,
        typer.Option(
            metavar="NUMBER",
            min=1,
            max=64,
            help="Processes of the server that each batch is spread over; --batch is a multiple of it.",
        ),
    ] = 1,
    bf16: Annotated[bool, typer.Option("--bf16", help="Compute in bfloat16 where that is safe.")] = False,
    seed: Annotated[
        int, typer.Option(metavar="NUMBER", help="Seed of the new head and of the order of the data.")
    ] = 0,
    publish: Annotated[
        str | None, typer.Option(metavar="ID", help="Publish the result as a hosted model with this id.")
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Save the weights to a .safetensors file."),
    ] = None,
    history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Save the events, one line of JSON each."),
    ] = None,
    keep: Annotated[
        bool | None,
        typer.Option(
            "--keep/--no-keep",
            help="Whether to keep the trainer on the server at the end. Default: if nothing is published or "
            "exported.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fine-tune a model on the server.

    The fit runs on the server and continues if this command is stopped; `trocar trainers watch` shows it. At
    the end the result is published or exported, or its trainer stays on the server.
    """
    rules = [_clamp(text) for text in clamp or ()]
    with allowed_values():
        saved = None if spool is None else trocar.training.save_on_disk(byte_count(spool, "--spool"))
    made = _optimizer(optimizer, lr, weight_decay)
    if evaluate is not None and eval_split:
        refuse("--eval-split: there is data to evaluate on, --eval; give one of the two")
    check_data(client, data, "DATA")
    if evaluate is not None:
        check_data(client, evaluate, "--eval")
    results = Results(publish, export, history, as_json)
    results.check(client)
    with allowed_values():
        trainer = client.train(
            model_id,
            head=head,
            trainable=trainable or (),
            optimizer=made,
            gradient_edits=rules,
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
        share = eval_split or 0.0
        if eval_split is None and compared is None:
            share = _default_split(dataset)
        with allowed_values():
            first = trainer.start_fit(
                dataset,
                epochs=epochs,
                batch_size=batch,
                eval=compared,
                eval_split=share,
                metrics=metric or ["accuracy"],
                augment=augment or (),
                early_stop=None if early_stop is None else trocar.training.early_stop(patience=early_stop),
                workers=workers,
            )
    if share:
        typer.echo(f"{share:.0%} of the samples are evaluated and not trained on (--eval-split)", err=True)
    told = follow(trainer, first, results)
    categories = _categories(client, dataset, head)
    if told.outcome == "finished":
        results.keep(trainer, categories)
    uses: dict[str, str] = {}
    if keep or (keep is None and not results.has_weights):
        uses = uses_of(trainer, dataset, epochs, batch, has_categories=bool(categories))
    end(trainer, told, results, uses)


def _default_split(dataset: StoredDataset) -> float:
    """Return the share to evaluate on: none without labels of classes, or where it would be no sample."""
    targets = list(dataset.targets.values())
    has_labels = len(targets) == 1 and targets[0].low is not None and not targets[0].shape
    return EVAL_SPLIT if has_labels and dataset.sample_count * EVAL_SPLIT >= 1 else 0.0


def _categories(client: Client, dataset: StoredDataset, head: int | None) -> tuple[str, ...]:
    """Return the names of the classes of a new head, where the data set has them."""
    names = client.dataset(dataset.dataset_id).categories
    return names if head == len(names) else ()


def _optimizer(name: str, lr: float | None, weight_decay: float | None) -> Optimizer:
    make = OPTIMIZERS.get(name)
    if make is None:
        refuse(f"--optimizer {not_one_of(name, OPTIMIZERS)}")
    given: dict[str, Any] = {} if lr is None else {"lr": lr}
    return make(**given) if weight_decay is None else make(**given, weight_decay=weight_decay)


def _clamp(text: str) -> GradientEdit:
    selector, _, limits = text.rpartition("=")
    low, colon, high = limits.partition(":")
    try:
        result = [None if end == "" else float(end) for end in (low, high)]
    except ValueError:
        result = []
    numbers = [end for end in result if end is not None]
    if not (selector and colon and numbers and all(map(math.isfinite, numbers))):
        refuse(f"--clamp: {text!r} does not look like 'fc.*=-0.1:0.1'; either limit can be left out")
    if numbers != sorted(numbers):
        refuse(f"--clamp: {text!r} has low above high; write LOW:HIGH")
    return trocar.training.gradient_edit(selector, "clamp", *result)
