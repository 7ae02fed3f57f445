"""Classes and attributions, which the client makes of passes, under the relations of values.

| relation | the two ways |
|---|---|
| `alone` | a sample in a batch, padded where the family has padding, and by itself |
| `order` | a batch, and the same in another order |
| `position` | arguments by name and by position; samples in one array and in a list of arrays |
| `sizes` | all samples in one pass, and in passes of fewer |
| `by hand` | `predict` and `attribute`, and NumPy on what `extract` returns |
| `company` | a call by itself, and beside calls of others |
| `local`, `gateway` | from the server, and on that way |
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

import trocar
from tests.relations.draw_taps import Rules
from tests.relations.families import FAMILIES
from tests.relations.family import Family
from tests.relations.hosting import Hosts
from tests.relations.layouts import BATCH, places
from tests.relations.outcome import Outcome
from tests.relations.replies import Parts, close, same_bits
from tests.relations.requests import draw_inputs, is_positional

SCORED = tuple(name for name, family in FAMILIES.items() if family.classes and name != "hf-vit")
MAPPED = (
    *("resnet", "squeezenet", "mobilenet", "vit", "swin", "convnext", "channels-last"),
    *("timm-vit", "timm-convnext", "timm-swin"),
)
"""Families whose class activation maps have a place of their own."""
WITH_RELUS = ("resnet", "squeezenet")
EVERYONE = tuple(range(BATCH))
_ALL = ("saliency", "input_x_gradient", "integrated_gradients", "occlusion", "layer_conductance")
_MAPS = ("grad_cam", "grad_cam_plus_plus")


@dataclass(frozen=True)
class Score:
    """One question.

    Attributes:
        family: Who is asked.
        method: `predict`, or a method of `attribute`.
        of: Makes the objective of some classes; None for the predicted ones.
        classes: The class of each of the `BATCH` samples.
        options: Further options.
    """

    family: Family
    method: str
    of: Callable[[Sequence[int]], trocar.Objective] | None = None
    classes: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def ask(
        self, client: trocar.Client, inputs: Any, samples: Sequence[int] = EVERYONE, **more: Any
    ) -> Parts:
        """Return the answer for inputs that hold these samples; each part has the samples first."""
        options = {**self.options, **more}
        if self.method == "predict":
            predictions = client.predict(self.family.name, inputs, top=self.family.classes, **options)
            return {("predict", "values"): _by_number(predictions)}
        if self.of is not None:
            options["of"] = self.of([self.classes[sample] for sample in samples])
        return _parts(client.attribute(self.family.name, inputs, self.method, **options))

    def given(self, inputs: dict[str, Any]) -> Any:
        """Return inputs as its method takes them."""
        return inputs if self.method == "predict" else next(iter(inputs.values()))


def _by_number(predictions: trocar.Predictions) -> Any:
    """Return the scores of all classes, (samples, classes)."""
    found = np.zeros((len(predictions), predictions.class_count))
    for row, prediction in enumerate(predictions):
        for one in prediction:
            found[row, one.number] = one.score
    return found


def _parts(result: trocar.Attribution) -> Parts:
    found: Parts = {("", "values"): result.values, ("", "classes"): np.asarray(result.classes)}
    for name in ("scores", "delta"):
        if getattr(result, name) is not None:
            found["", name] = np.asarray(getattr(result, name))
    if result.inputs.ndim == 4:
        found["", "heatmap"] = result.heatmap
    return found


def draw_score(chance: Random, name: str, *, by_sample: bool) -> Score:
    """Draw a question; with `by_sample` the answer for a sample depends on that sample alone."""
    family = FAMILIES[name]
    if len(family.axes) > 1 or chance.random() < 0.3:
        activation: Any = chance.choice(["softmax", "sigmoid", "none"])
        return Score(family, "predict", options={"activation": activation, **_edits(chance, name)})
    methods = [*_ALL, *(_MAPS * 2 if name in MAPPED else ())]
    methods += ["guided_backprop"] if name in WITH_RELUS else []
    methods += [] if by_sample else ["smoothgrad"]  # its noise depends on the place of a sample
    method = chance.choice(methods)
    make = chance.choice([trocar.logit, trocar.probability, trocar.log_probability])
    classes = tuple(chance.randrange(family.classes) for _ in EVERYONE)
    return Score(
        family,
        method,
        None if chance.random() < 0.3 else lambda chosen: make(list(chosen)),
        classes,
        _options(chance, method, name),
    )


def _edits(chance: Random, name: str) -> dict[str, Any]:
    usable = [place for place in places(name) if place.is_float and place.samples == 0]
    if chance.random() < 0.5:
        return {}
    return {"edits": trocar.edit(chance.choice(usable).selector, "scale", 0.5)}


def _options(chance: Random, method: str, name: str) -> dict[str, Any]:
    family, baseline = FAMILIES[name], chance.choice([0.0, 0.25])
    if method in ("integrated_gradients", "layer_conductance"):
        options = {"baseline": baseline, "steps": chance.choice([3, 6]), "delta": chance.random() < 0.5}
        return options | ({"at": _middle(chance, name)} if method == "layer_conductance" else {})
    if method == "occlusion":
        (letters,) = family.axes.values()
        sizes = [family.sizes.get(letter) or int(letter) for letter in letters[1:]]
        return {"baseline": baseline, "window": tuple(-(-size // 2) for size in sizes)}
    if method == "smoothgrad":
        over = chance.choice(["saliency", "input_x_gradient"])
        return {"over": over, "samples": 4, "sigma": 0.3, "seed": chance.randrange(9)}
    return {"abs": chance.random() < 0.5} if method == "saliency" else {}


def _middle(chance: Random, name: str) -> str:
    """Return a value with samples first, of the rank of the inputs if there is one."""
    usable = [
        place for place in places(name) if place.is_float and place.samples == 0 and "[" not in place.selector
    ]
    spatial = [place for place in usable if place.rank == len(next(iter(FAMILIES[name].axes.values())))]
    return chance.choice(spatial[: len(spatial) // 2 + 1] or usable).selector


# --- Relations ----------------------------------------------------------------------------------------

Relation = Callable[[Hosts, str, Random], Outcome]


def _begin(
    chance: Random, name: str, relation: str, *, by_sample: bool
) -> tuple[Score, dict[str, Any], Outcome]:
    family = FAMILIES[name]
    rules = Rules(is_padded=bool(family.sides), side=chance.choice(family.sides or ("right",)))
    score = draw_score(chance, name, by_sample=by_sample)
    return score, draw_inputs(chance, family, rules), Outcome(relation, name)


def _compare(outcome: Outcome, score: Score, one: Parts, other: Parts, *, bits: bool = False) -> Outcome:
    """Compare answers; the classes exactly."""
    if one.keys() != other.keys():
        outcome.comparison.refuse(f"{score.method}: parts {sorted(one)} and {sorted(other)}")
    for part in one.keys() & other.keys():
        is_exact = bits or part[1] == "classes"
        same = same_bits if is_exact else close(3e-2 if part[1] == "heatmap" else 3e-3)
        outcome.comparison.note((score.method, part[1]), one[part], other[part], same)
    return outcome


def alone(hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare a sample of a batch with itself alone."""
    score, inputs, outcome = _begin(chance, name, "alone", by_sample=True)
    sample = chance.randrange(BATCH)
    together = score.ask(hosts.client, score.given(inputs))
    single = score.ask(hosts.client, score.given(score.family.alone(inputs, sample)), [sample])
    rows = {part: value[sample : sample + 1] for part, value in together.items()}
    return _compare(outcome, score, rows, single)


def order(hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare a batch with the same samples in another order."""
    score, inputs, outcome = _begin(chance, name, "order", by_sample=True)
    permutation = chance.choice([[2, 0, 1], [1, 2, 0], [2, 1, 0]])
    one = score.ask(hosts.client, score.given(inputs))
    other = score.ask(hosts.client, score.given(score.family.take(inputs, permutation)), permutation)
    return _compare(outcome, score, {part: value[permutation] for part, value in one.items()}, other)


def position(hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare arguments by name with the same by position, or in a list."""
    score, inputs, outcome = _begin(chance, name, "position", by_sample=False)
    usual = score.given(inputs)
    if score.method == "predict":
        if not is_positional(score.family, score.family.build()):
            return outcome
        other: Any = tuple(inputs.values())
    else:
        other = list(usual)
    one, two = score.ask(hosts.client, usual), score.ask(hosts.client, other)
    return _compare(outcome, score, one, two, bits=True)


def sizes(hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare all samples in one pass with passes of one or two."""
    score, inputs, outcome = _begin(chance, name, "sizes", by_sample=False)
    given, size = score.given(inputs), chance.choice([1, 2])
    one, other = score.ask(hosts.client, given), score.ask(hosts.client, given, batch_size=size)
    return _compare(outcome, score, one, other)


def by_hand(hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare with NumPy on values and gradients; methods of several passes are left out."""
    score, inputs, outcome = _begin(chance, name, "by hand", by_sample=True)
    given = score.given(inputs)
    if score.method == "predict":
        edits = score.options.get("edits", ())
        (scores,) = hosts.client.extract(name, given, "/out", edits=edits).values()
        own = _activated(scores, score.options["activation"])
        return _compare(outcome, score, score.ask(hosts.client, given), {("predict", "values"): own})
    if score.method not in ("saliency", "input_x_gradient", "grad_cam") or score.of is None:
        return outcome
    result = hosts.client.attribute(name, given, score.method, of=score.of(score.classes), **score.options)
    at = result.at
    taps = [trocar.tap(at, alias="value"), trocar.tap(at, alias="gradient", gradient=True)]
    maps = hosts.client.extract(name, given, taps, of=score.of(score.classes))
    value, gradient = maps["value"], maps["gradient"]
    if score.method == "grad_cam":
        if value.ndim != 4 or result.channel_dim not in (None, 1) or maps.info["value"].channel_dim != 1:
            return outcome
        own = np.maximum((value * gradient.mean((2, 3), keepdims=True)).sum(1), 0)
    elif score.method == "saliency":
        own = np.abs(gradient) if score.options["abs"] else gradient
    else:
        own = value * gradient
    return _compare(outcome, score, {("", "values"): result.values}, {("", "values"): own})


def _activated(scores: Any, activation: str) -> Any:
    rows = scores.astype(np.float64)
    if activation == "sigmoid":
        return 1 / (1 + np.exp(-rows))
    if activation == "softmax":
        powers = np.exp(rows)
        return powers / powers.sum(1, keepdims=True)
    return rows


def company(hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare a call with the same beside calls of others."""
    score, inputs, outcome = _begin(chance, name, "company", by_sample=False)
    other, theirs, _ = _begin(chance, name, "company", by_sample=False)
    quiet = score.ask(hosts.client, score.given(inputs))
    with ThreadPoolExecutor(3) as callers:
        others = [callers.submit(other.ask, hosts.client, other.given(theirs)) for _ in range(2)]
        beside = callers.submit(score.ask, hosts.client, score.given(inputs)).result()
        for one in others:
            one.result()
    return _compare(outcome, score, quiet, beside, bits=True)


def elsewhere(way: str, hosts: Hosts, name: str, chance: Random) -> Outcome:
    """Compare the server with a local one, or with the way through a gateway."""
    score, inputs, outcome = _begin(chance, name, way, by_sample=False)
    if way == "local" and score.family.says_nothing:
        return outcome
    one = score.ask(hosts.client, score.given(inputs))
    return _compare(outcome, score, one, score.ask(getattr(hosts, way), score.given(inputs)), bits=True)


SCORE_RELATIONS: dict[str, Relation] = {
    "alone": alone,
    "order": order,
    "position": position,
    "sizes": sizes,
    "by hand": by_hand,
    "company": company,
    "local": lambda *given: elsewhere("local", *given),
    "gateway": lambda *given: elsewhere("gateway", *given),
}
"""The relations by name."""
