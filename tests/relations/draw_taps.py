"""Random taps at the values of a family, mostly of kinds that fit."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

import numpy as np

import trocar
from tests.relations.layouts import Place
from tests.relations.request import Wanted
from trocar_api.v1 import tap_pb2

SUMMARIES = [
    *("mean", "var", "std", "min", "max", "absmax", "l2", "zero_fraction", "nan_count", "inf_count"),
    *("l1", "skewness", "kurtosis", "quantiles", "histogram", "count"),
]

_MOMENTS = ("skewness", "kurtosis")
"""They do not know of the size of values: of gradients that cancel they are moments of rounding errors."""

Drawn: TypeAlias = tuple[Sequence[trocar.Reduction], int | None, bool]
"""Reductions, the dimension of samples after them, and whether the other dimensions are as before."""


@dataclass(frozen=True)
class Rules:
    """What a relation lets a request say.

    Attributes:
        by_sample: Each sample's part of the reply depends on that sample alone.
        is_padded: Samples have padding, which must not count.
        side: The side of the padding.
    """

    by_sample: bool = False
    is_padded: bool = False
    side: str = "right"


class PartsTap(trocar.Tap):
    """A tap whose selector is sent in parts."""

    def to_wire(self) -> tap_pb2.Tap:
        """Return the message with `parts` in place of `selector`."""
        message = super().to_wire()
        in_parts(message)
        return message


def in_parts(message: Any) -> None:
    """Replace the selector of a tap or edit by its parts, if it is a module path, a port and picks."""
    plain, _, picks = message.selector.partition("[")
    path, _, port = plain.partition("/")
    path, _, call = path.partition("@")
    if ":" not in message.selector and call != "*":
        message.selector = ""
        steps = [step.strip('"') for step in picks.removesuffix("]").split("][") if step]
        message.parts.CopyFrom(
            tap_pb2.SelectorParts(
                kind=tap_pb2.SELECTOR_KIND_MODULE,
                path=path,
                call=int(call) if call else None,
                port=port,
                picks=[
                    tap_pb2.Pick(position=int(step)) if step.isdigit() else tap_pb2.Pick(key=step)
                    for step in steps
                ],
            )
        )


def draw_tap(chance: Random, place: Place, number: int, rules: Rules, *, gradient: bool = False) -> Wanted:
    """Draw a tap at a place."""
    options: dict[str, Any] = {"gradient": gradient}
    if chance.random() < 0.5:
        options["alias"] = f"tap {number}"
    reductions, rows, is_cut = _reductions(chance, place, rules)
    if reductions:
        options["reduce"] = reductions
        if rows is not None:
            options["channel_dim"] = chance.choice(
                [None, channels_of(place), channels_of(place) - place.rank]
            )
    _statistics(chance, place, rules, rows, options, bool(reductions))
    if options.get("channel_dim") is None:
        options.pop("channel_dim", None)
    if options.get("values", True) and chance.random() < 0.2:
        options["cast"] = _cast(chance, rules)
    if not rules.is_padded and chance.random() < 0.15:
        options["padding"] = True
    tap = trocar.tap(place.selector, **options)
    if chance.random() < 0.15:
        tap = PartsTap(**tap.__dict__)
    return Wanted(tap, place, rows, is_cut)


def _cast(chance: Random, rules: Rules) -> str:
    # One scale of int8 is of all samples.
    return chance.choice(["float16", "bfloat16"] + ([] if rules.by_sample else ["int8", "int8_per_channel"]))


def _statistics(
    chance: Random, place: Place, rules: Rules, rows: int | None, options: dict[str, Any], reduced: bool
) -> None:
    if not place.is_float or chance.random() < 0.35:
        return
    over = "sample" if rules.by_sample else chance.choice(["all", "channel", "sample"])
    if over == "channel" and reduced and place.rank < 4:
        over = "all"  # a reduction may leave one dimension
    if rules.by_sample and rows is None:
        return
    usable = [
        name for name in SUMMARIES if not (rules.by_sample and options["gradient"] and name in _MOMENTS)
    ]
    names: list[Any] = chance.sample(usable, chance.randint(1, 5))
    if over == "channel":
        names += chance.choice([[], ["covariance"]])
    elif place.rank > 1 and not reduced and chance.random() < 0.3:
        names.append("argmax_channel")
    edges = trocar.histogram([-1, -0.1, 0, 0.3, 2])
    if not rules.by_sample and chance.random() < 0.5:
        edges = trocar.histogram(bins=chance.choice([4, 16]))  # whose edges are of the whole batch
    said = {"quantiles": trocar.quantiles(0.1, 0.5, 0.95), "histogram": edges}
    options["stats"] = [said.get(name, name) for name in names]
    options["over"] = over
    if chance.random() < 0.4:
        options["values"] = False
    if (over == "channel" or "argmax_channel" in names) and place.rank > 1 and not reduced:
        options["channel_dim"] = chance.choice([None, channels_of(place)])


def channels_of(place: Place) -> int:
    """The dimension of channels: the last of three, otherwise the second."""
    return 0 if place.rank == 1 else place.rank - 1 if place.rank == 3 else 1


def _reductions(chance: Random, place: Place, rules: Rules) -> Drawn:
    """Draw reductions of a value."""
    usual = (), place.samples, True
    if place.samples != 0 or place.rank < 2 or not place.is_float or chance.random() < 0.4:
        return usual
    choices = _padded_choices if rules.is_padded and (place.lengths or place.stretched) else _choices
    made = choices(chance, place, rules)
    return made if made is not None else usual


def _choices(chance: Random, place: Place, rules: Rules) -> Any:
    least, width = min(place.shape[1:]), place.shape[channels_of(place)]
    indices: list[Any] = [np.s_[:, :least], np.s_[:, ..., 0], np.s_[:, ::2], np.s_[..., -1:]]
    kinds: list[tuple[Any, int | None]] = [
        ([trocar.index(chance.choice(indices))], 0),
        ([trocar.channels(chance.choice([[0], [least - 1, 0], [-1]])), *_then(chance, place)], 0),
        ([_top_k(chance, least)], 0),
        ([trocar.project(3, seed=chance.randrange(5))], 0),
        ([_pca(chance, width)], 0),
    ]
    if place.rank == 3 and place.shape[1] > 4:
        kinds.append(([trocar.grid(2, 2, prefix=place.shape[1] - 4)], 0))
    if place.rank == 3:
        kinds.append(([trocar.tokens(chance.choice([[0], [-1, 0], slice(0, 2)]))], 0))
        kinds.append(([trocar.tokens(chance.choice(["cls", "last"]))], 0))
    if place.rank > 2:
        kinds.append(([_crop(chance, place)], 0))
        kinds.append(([_pool(chance, place)], 0))
        kinds.append(([trocar.peak()], 0))
        kinds.append(([trocar.gram(normalized=chance.random() < 0.5)], 0))
    if not rules.by_sample:
        rows: list[Any] = [np.s_[0], np.s_[-2:], np.s_[1:, ..., 0]]
        kinds.append(([trocar.index(chance.choice(rows))], None))
        kinds.append(([trocar.samples(chance.choice([[0], [2, 0], [-1, 1]]))], None))
    reductions, dimension = chance.choice(kinds)
    return reductions, dimension, False


def _top_k(chance: Random, least: int) -> trocar.Reduction:
    count = 1 + chance.randrange(min(2, least))
    return trocar.top_k(count, chance.choice([-1, 1]), smallest=chance.random() < 0.5)


def _crop(chance: Random, place: Place) -> trocar.Reduction:
    rows, columns = place.shape[-2:]
    top, left = chance.randrange(rows), chance.randrange(columns)
    return trocar.crop(top, left, rows - top, columns - left)


def _pool(chance: Random, place: Place) -> trocar.Reduction:
    kind: Any = chance.choice(["avg", "max", "gem"])
    size = chance.choice([None, 1]) if place.rank < 3 else chance.choice([None, 1, 2])
    return trocar.pool(kind, size, **({"power": 2.0} if kind == "gem" and chance.random() < 0.5 else {}))


def _pca(chance: Random, width: int) -> trocar.Reduction:
    random = np.random.default_rng(width)
    rows = random.standard_normal((2, width)).astype(np.float32)
    mean = random.standard_normal(width).astype(np.float32) if chance.random() < 0.5 else None
    return trocar.pca(rows, mean)


def _then(chance: Random, place: Place) -> list[trocar.Reduction]:
    return [trocar.pool("max")] if place.rank > 2 and chance.random() < 0.3 else []


def _padded_choices(chance: Random, place: Place, _: Rules) -> Any:
    """Reductions for which padding is said to be left out, and those that do not look at tokens."""
    if place.rank != 3 or (1 not in place.lengths.values() and not place.stretched):
        return None
    kind = chance.choice(["pool", "cls", "gram", "channels", "pca"])
    if kind == "pool":
        return [trocar.pool(chance.choice(["avg", "max", "gem"]))], 0, False
    if kind == "cls":
        return [trocar.pool(chance.choice(["cls", "last"]))], 0, False
    if kind == "gram":
        return [trocar.gram(normalized=chance.random() < 0.5)], 0, False
    if kind == "channels":
        return [trocar.channels([0, place.shape[2] - 1])], 0, True
    if place.stretched or 2 in place.lengths.values():
        return None  # components are of a fixed number of channels
    return [_pca(chance, place.shape[2])], 0, True
