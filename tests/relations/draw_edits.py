"""Random edits and objectives of a family."""

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.draw_taps import Rules, channels_of, in_parts
from tests.relations.family import Family
from tests.relations.layouts import Place

Objective = Callable[[int], trocar.Objective]

_ALWAYS = [
    *("set", "zero", "add", "scale", "affine", "clamp", "steer", "cap", "project_out", "project_onto"),
    *("top_k", "cast", "nan_to_num", "normalise", "mean_ablate", "swap", "add_input", "skip"),
]
_OVER_SAMPLES = ["noise", "resample", "dropout", "int8", "swap source", "mean of batch"]


def draw_edit(chance: Random, place: Place, rules: Rules, *, has_source: bool = False) -> trocar.Edit:
    """Draw an edit at a place."""
    names = _ALWAYS if rules.by_sample else [*_ALWAYS, *_OVER_SAMPLES]
    left_out = set() if has_source else {"swap source"}
    if "[" in place.selector:
        left_out |= {"swap", "add_input", "skip"}
    name = chance.choice([name for name in names if name not in left_out])
    values, options = _operation(chance, name, place, rules)
    kinds = {"int8": "cast", "swap source": "swap", "mean of batch": "mean_ablate"}
    options |= _region(chance, name, place, rules)
    if chance.random() < 0.3:
        options["order"] = "after"
    edit = trocar.edit(place.selector, kinds.get(name, name), *values, **options)  # type: ignore[arg-type]
    if chance.random() < 0.2:
        in_parts(edit.message)
    return edit


def _operation(chance: Random, name: str, place: Place, rules: Rules) -> tuple[list[Any], dict[str, Any]]:
    """Return the values of an operation, and its options."""
    width = place.shape[channels_of(place)]
    vector = np.random.default_rng(width).standard_normal(width).astype(np.float32)
    along = {"channel_dim": channels_of(place) - chance.choice([0, place.rank])}
    number = round(chance.uniform(-1, 1), 2)
    constant: Any = number if chance.random() < 0.6 else np.full(place.shape[-1:], number, np.float32)
    is_so, seed = chance.random() < 0.5, chance.randrange(9)
    made: dict[str, tuple[list[Any], dict[str, Any]]] = {
        **dict.fromkeys(("set", "add", "scale"), ([constant], {})),
        "affine": ([constant, number], {}),
        "clamp": ([], chance.choice([{"low": -0.1}, {"high": 0.2}, {"low": -0.2, "high": 0.3}])),
        "noise": ([0.1], {"kind": chance.choice(["gaussian", "uniform"]), "seed": seed}),
        "resample": ([], {"seed": seed + 1}),
        "dropout": ([0.3], {"seed": seed}),
        "steer": (
            [vector],
            {"alpha": number, "keep_norm": is_so, "relative": chance.random() < 0.5, **along},
        ),
        "cap": ([vector], {"low": -abs(number), "high": 0.5 * abs(number), **along}),
        **dict.fromkeys(("project_out", "project_onto"), ([vector[None]], along)),
        "top_k": (
            [min(2, width)],
            {"absolute": is_so, **chance.choice([along, {"dim": channels_of(place)}])},
        ),
        "cast": ([chance.choice(["float16", "bfloat16"])], {}),
        "int8": (["int8"], {}),
        "normalise": ([0.7], {"exact": is_so, **_scope(chance, rules, along)}),
        "nan_to_num": ([], chance.choice([{}, {"nan": 0.5}, {"posinf": 1.0, "neginf": -1.0}])),
        "mean_ablate": ([vector], along),
        "swap": ([], {"at": place.selector + "/in"}),
        "swap source": ([], {"source": "other"}),
    }
    return made.get(name, ([], {}))


def _scope(chance: Random, rules: Rules, along: dict[str, Any]) -> dict[str, Any]:
    scopes = ["channel_vector"]
    scopes += [] if rules.is_padded else ["sample"]
    scopes += [] if rules.by_sample else ["all"]
    scope = chance.choice(scopes)
    return {"scope": scope, **(along if scope == "channel_vector" else {})}


_OF_CHANNELS = frozenset(
    (
        "steer",
        "cap",
        "project_out",
        "project_onto",
        "mean_ablate",
        "top_k",
        "swap",
        "swap source",
        "add_input",
    )
)
"""Operations that need all channels."""


def _region(chance: Random, name: str, place: Place, rules: Rules) -> dict[str, Any]:
    """Draw the part that is changed."""
    if place.samples != 0 or place.rank < 2 or name == "skip" or chance.random() < 0.5:
        return {}
    if name in _OF_CHANNELS:
        return {} if rules.by_sample or name == "mean_ablate" else {"samples": [0, 2]}
    least = min(place.shape[1:])
    choices: list[dict[str, Any]] = [{"channels": sorted({0, least - 1})}]
    if not (rules.is_padded and (place.lengths or place.stretched)):
        choices += [{"index": np.s_[:, :least]}, {"index": np.s_[:, ..., 0]}]
        mask = np.random.default_rng(least).random((1, *place.shape[1:])) < 0.5
        choices += [{"mask": mask}] if name != "normalise" else []
        choices += [{"tokens": [0, -1]}] if place.rank == 3 else []
    if not rules.by_sample:
        choices += [{"samples": [1]}, {"samples": slice(0, 2), "channels": [0]}, {"index": np.s_[1:2]}]
    return chance.choice(choices)


def draw_objective(
    chance: Random, family: Family, place: Place, earlier: Place, rules: Rules
) -> Objective | None:
    """Draw an objective at a value, or None where the value can have none; penalties are at `earlier`."""
    if place.samples != 0 or place.rank < 2 or (rules.is_padded and (place.lengths or place.stretched)):
        return None
    terms = [_term(chance, family, place, earlier, rules)]
    if chance.random() < 0.3:
        terms.append(_term(chance, family, place, earlier, rules))
    weight = chance.choice([1.0, 0.5, -2.0])

    def of(batch: int) -> trocar.Objective:
        first, *rest = [term(batch) for term in terms]
        return sum(rest, first if weight == 1.0 else weight * first)

    return of


def _term(chance: Random, family: Family, place: Place, earlier: Place, rules: Rules) -> Objective:
    kinds = ["value", "value reduced"] + (["class", "class"] if family.classes else [])
    if not rules.by_sample:
        kinds += ["loss"] + (["cross_entropy"] if family.classes else [])
        kinds += ["penalty"] if earlier.samples == 0 and earlier.selector != place.selector else []
    kind = chance.choice(kinds)
    if kind == "class":
        make = chance.choice([trocar.logit, trocar.probability, trocar.log_probability])
        chosen = chance.randrange(family.classes)
        if chance.random() < 0.3:
            return lambda batch: make([chosen] * batch)
        return lambda _: make(chosen)
    if kind == "cross_entropy":
        name: Any = chance.choice(["cross_entropy", "nll"])
        return lambda batch: trocar.loss(name, [1] * batch)
    if kind == "loss":
        return _loss(chance, place)
    if kind == "penalty":
        center = chance.choice([0.0, 1.0])
        inner = trocar.value(place.selector, function="square")
        return lambda _: trocar.gradient_penalty(inner, at=earlier.selector, center=center)
    function: Any = chance.choice([None, "square", "abs", "exp", "log"])
    reduce: Any = "sum" if rules.by_sample else chance.choice(["sum", "mean", "norm"])
    reductions = [trocar.pool("avg")] if kind == "value reduced" and place.rank > 2 else []
    dim = channels_of(place) if reductions and chance.random() < 0.3 else None
    return lambda _: trocar.value(
        place.selector, reduce=reduce, function=function, reductions=reductions, channel_dim=dim
    )


def _loss(chance: Random, place: Place) -> Objective:
    kind: Any = chance.choice(["mse", "l1", "smooth_l1", "bce_with_logits", "kl_div"])
    reduction: Any = chance.choice(["mean", "sum"])
    dtype: Any = chance.choice([np.float32, np.float32, np.float64])

    def of(batch: int) -> trocar.Objective:
        labels = np.random.default_rng(0).random((batch, *place.shape[1:]), dtype=dtype)
        return trocar.loss(kind, labels, at=place.selector, reduction=reduction)

    return of
