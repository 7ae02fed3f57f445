"""Objective options of gradients: `--of` and `--labels`.

| written                         | is                                                                  |
|---------------------------------|---------------------------------------------------------------------|
| `logit:207`, `prob:207`         | the output of a class, its probability; `log_prob` its logarithm     |
| `logit:goldfish`, `logit:1,207` | the class by name; one class for each image                          |
| `logit`, or nothing             | the class that the model gives the largest output, for each image    |
| `loss:cross_entropy`            | a loss, with `--labels`                                              |
| `norm:layer4`                   | the Euclidean norm of a value; `sum` and `mean` of its elements      |
| `squares:layer4`                | the sum of the squares of a value                                    |
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from trocar import Client
from trocar._base.names import name_hint
from trocar._cli.failures import refuse
from trocar._request.objectives import Objective
from trocar._request.scores import AGGREGATES, LOSSES, log_probability, logit, loss, probability, value
from trocar._sources.arrays import ARRAY_SUFFIX, open_npy
from trocar.errors import SourceError
from trocar_api.class_names import class_number

Of = Annotated[
    str | None,
    typer.Option(
        "--of",
        metavar="OBJECTIVE",
        help="Objective to differentiate: logit:CLASS, prob:CLASS, loss:NAME with --labels, or "
        "norm:SELECTOR, sum:SELECTOR, mean:SELECTOR, squares:SELECTOR. Default: the logit of the predicted "
        "class.",
    ),
]
Labels = Annotated[
    str | None,
    typer.Option(
        metavar="LABELS", help="Labels of a loss: class numbers or names, one per image, or a .npy file."
    ),
]

_SCORES: dict[str, Callable[[Any], Objective]] = {
    "logit": logit,
    "prob": probability,
    "log_prob": log_probability,
}
_CLASS_LOSSES = ("cross_entropy", "nll")
_MOST_NAMES = 4


@dataclass(frozen=True)
class Wanted:
    """Objective of gradients."""

    objective: Objective
    text: str
    """For people to read, with the names of classes where they are known."""


def read_objective(
    client: Client, model_id: str, inputs: Any, of: str | None, labels: str | None, *, adapter: str = ""
) -> Wanted:
    """Read `--of` and `--labels`.

    Args:
        client: Client for the classes.
        model_id: The model.
        inputs: Of one pass; they are run if a class must be predicted.
        of: The option, None where it is not given.
        labels: The option, None where it is not given.
        adapter: Name of the LoRA adapter that the pass has; none when empty.

    Raises:
        typer.BadParameter: It matches none of the notations above.
        TrocarError: A call failed.
    """
    kind, _, rest = ("logit" if of is None else of).partition(":")
    kind, rest = kind.strip(), rest.strip()
    if labels is not None and kind != "loss":
        refuse("--labels needs --of loss:NAME")
    try:
        if kind in _SCORES:
            return _class_score(client, model_id, inputs, kind, rest, adapter)
        if kind == "loss":
            result = _loss(client, model_id, rest, labels)
        elif kind in AGGREGATES:
            result = value(rest, reduce=kind)  # type: ignore[arg-type]  # it is one of them
        elif kind == "squares":
            result = value(rest, function="square")
        else:
            hint = name_hint(kind, (*_SCORES, "loss", *AGGREGATES, "squares"))
            refuse(f"--of: no {kind!r}; {hint}; write for example logit:207")
    except (TypeError, ValueError, SourceError) as error:
        refuse(f"--of {of}: {error}")
    return Wanted(result, repr(result))


def _class_score(client: Client, model_id: str, inputs: Any, kind: str, rest: str, adapter: str) -> Wanted:
    make = _SCORES[kind]
    if not rest:
        classes = _predicted(client, model_id, inputs, adapter)
        categories = client.model(model_id).categories
    else:
        classes, categories = _classes(client, model_id, rest)
    result = make(classes[0] if len(classes) == 1 else classes)
    names = [categories[number] for number in classes[:_MOST_NAMES] if number < len(categories)]
    more = ", ..." if len(classes) > _MOST_NAMES else ""
    return Wanted(result, f"{result!r} ({', '.join(names)}{more})" if names else repr(result))


def _predicted(client: Client, model_id: str, inputs: Any, adapter: str) -> list[int]:
    """Return the class with the largest output for each image."""
    maps = client.extract(model_id, inputs, "/out", adapter=adapter)
    scores = next(iter(maps.values())) if len(maps) == 1 else None
    if scores is None or scores.ndim != 2 or not scores.size:
        raise ValueError("the model's output is not (images, classes), so no class is predicted; give --of")
    if np.isnan(scores).any():
        raise ValueError("the model's output holds NaN, so no class is predicted; give --of")
    return [int(number) for number in scores.argmax(axis=1)]


def _classes(client: Client, model_id: str, text: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the classes that a text names, and the names of all if they were needed."""
    parts = [part.strip() for part in text.split(",")]
    if all(part.isdecimal() for part in parts):
        return [int(part) for part in parts], ()
    categories = client.model(model_id).categories
    if not categories:
        raise ValueError(f"the classes of {model_id} have no names on the server; give their numbers")
    if text.lower() in map(str.lower, categories):  # with a comma in it
        return [class_number(text, categories)], categories
    return [int(part) if part.isdecimal() else class_number(part, categories) for part in parts], categories


def _loss(client: Client, model_id: str, name: str, labels: str | None) -> Objective:
    if name not in LOSSES:
        raise ValueError(f"no loss {name!r}; {name_hint(name, LOSSES)}")
    if labels is None:
        raise ValueError("a loss needs --labels")
    return loss(name, _labels(client, model_id, name, labels))  # type: ignore[arg-type]  # it is one of them


def _labels(client: Client, model_id: str, name: str, text: str) -> Any:
    if text.endswith(ARRAY_SUFFIX):
        return open_npy(Path(text))[...]
    if name in _CLASS_LOSSES:
        return np.array(_classes(client, model_id, text)[0], np.int64)
    try:
        return np.array([float(part) for part in text.split(",")], np.float32)
    except ValueError:
        raise ValueError(f"--labels {text}: not numbers with commas between them, and no .npy file") from None
