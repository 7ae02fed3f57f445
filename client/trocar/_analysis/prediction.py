"""Prediction: the classes of each sample by name, with scores, best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args, overload

import numpy as np

from trocar._base.names import few, shortened, unknown_name
from trocar._base.tables import first_lines, html_table, number_text
from trocar._base.tensors import Array, float_array
from trocar._base.text_tables import text_table
from trocar._request.taps import Tap, lens
from trocar._request.text_positions import positions
from trocar._result.likely_tokens import IDS
from trocar_api.value_words import not_one_of

if TYPE_CHECKING:
    from trocar._base.types import Model
    from trocar._result.extraction_plan import ExtractionPlan
    from trocar._result.feature_maps import FeatureMaps

Activation = Literal["softmax", "sigmoid", "none"]

OUTPUT = "/out"
LOGITS = '/out["logits"]'
"""What Hugging Face's models call their scores."""
_EMPTY = "the inputs are empty; pass at least one sample"
_HEAD = ("sample", "class", "number", "score")
_MOST_NAME = 48
"""Characters of a sample's name in a table."""


@dataclass(frozen=True)
class ClassScore:
    """One class of one sample."""

    number: int
    """The class, from 0."""
    name: str
    """Its name; empty where the server knows none."""
    score: float
    """Its score: a probability, 0 to 1, unless `activation="none"`."""

    @property
    def label(self) -> str:
        """The name, or `class 3` without one."""
        return self.name or f"class {self.number}"

    def __str__(self) -> str:
        """As `tabby cat 0.8312`."""
        return f"{self.label} {self.score:.4f}"


@dataclass(frozen=True)
class Prediction(Sequence[ClassScore]):
    """The best classes of one sample, best first; indexable."""

    sample: str
    """The file, the text, or `sample 3`."""
    classes: tuple[ClassScore, ...]
    """Best first; of equal scores the lower number first."""

    @property
    def top(self) -> ClassScore:
        """The best class."""
        return self.classes[0]

    @property
    def name(self) -> str:
        """The name of the best class; empty if the server knows none."""
        return self.top.name

    @property
    def score(self) -> float:
        """The score of the best class."""
        return self.top.score

    def __len__(self) -> int:
        return len(self.classes)

    @overload
    def __getitem__(self, index: int) -> ClassScore: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ClassScore, ...]: ...
    def __getitem__(self, index: int | slice) -> ClassScore | tuple[ClassScore, ...]:
        return self.classes[index]

    def __str__(self) -> str:
        return f"{self.sample}: {', '.join(map(str, self.classes))}"

    def __repr__(self) -> str:
        return f"<Prediction {shortened(self.sample, _MOST_NAME)}: {few(self.classes)}>"

    def _repr_html_(self) -> str:
        """Show a row for each class in a notebook."""
        rows = [(one.label, str(one.number), number_text(one.score)) for one in self.classes]
        return html_table(_HEAD[1:], rows, self.sample)


@dataclass(frozen=True)
class Predictions(Sequence[Prediction]):
    """The best classes of every sample; see `Client.predict`.

    found = client.predict("resnet50", ["cat.jpg", "dog.jpg"])
    found[0].name, found[0].score            # best class of the first sample
    found["dog.jpg"][1]                      # second best class of another
    print(found)
    """

    samples: tuple[Prediction, ...]
    """In the order of the inputs."""
    model_id: str
    """The model."""
    activation: Activation
    """How scores were computed from the model's output."""
    class_count: int
    """Number of classes of the model."""

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.samples)

    @overload
    def __getitem__(self, index: int | str) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prediction, ...]: ...
    def __getitem__(self, index: int | str | slice) -> Prediction | tuple[Prediction, ...]:
        """Return a sample by position or name, or several by a slice.

        Raises:
            IndexError: There is no such position.
            KeyError: There is no sample of this name.
        """
        if not isinstance(index, str):
            return self.samples[index]
        for outcome in self.samples:
            if outcome.sample == index:
                return outcome
        raise unknown_name("sample", index, [outcome.sample for outcome in self.samples])

    def __str__(self) -> str:
        return text_table(_HEAD, self._cells(), ("number", "score"))

    def __repr__(self) -> str:
        title = f"Predictions of {self.model_id} for {len(self)} {'sample' if len(self) == 1 else 'samples'}:"
        best = (f"  {shortened(one.sample, _MOST_NAME)}: {one.top}" for one in self.samples)
        return first_lines("\n".join([title, *best]))

    def _repr_html_(self) -> str:
        """Show the table in a notebook."""
        return html_table(_HEAD, self._cells(), self.model_id)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                shortened(one.sample, _MOST_NAME) if not place else "",
                outcome.name,
                str(outcome.number),
                number_text(outcome.score),
            )
            for one in self.samples
            for place, outcome in enumerate(one.classes)
        ]


@dataclass(frozen=True)
class ClassOutput:
    """Where a model's scores are: one value of shape (batch, classes)."""

    model_id: str
    """The model."""
    selector: str
    """The selector of the value."""
    count: int
    """Number of classes."""
    names: tuple[str, ...]
    """Their names; empty where the server knows none."""
    is_of_tokens: bool = False
    """Whether it is (batch, tokens, classes), of the next token."""

    def checked(self, values: Array) -> Array:
        """Return the scores of a batch.

        Raises:
            ValueError: They are not (batch, classes).
        """
        if values.ndim != 2 or values.shape[1] != self.count:
            raise ValueError(
                f"{self.selector} of {self.model_id} has shape {values.shape} for these inputs, not "
                f"(batch, {self.count}); client.extract({self.model_id!r}, inputs, {self.selector!r}) "
                "returns it as it is"
            )
        return values


def class_output(model: Model, plan: ExtractionPlan) -> ClassOutput:
    """Return where a model's scores are: its one output, or the one that is called `logits`.

    Args:
        model: The model, categories included.
        plan: A dry run of its output for one example input.

    Raises:
        ValueError: The model's output is no scores of classes.
    """
    outputs = plan.feature_maps
    name = LOGITS if LOGITS in outputs else next(iter(outputs)) if len(outputs) == 1 else None
    if name is None:
        raise _no_classes(model, plan, "several values")
    shape, dtype = outputs[name].shape, outputs[name].dtype
    if len(shape) != 2 or not shape[1]:
        raise _no_classes(model, plan, f"a value of shape {shape}")
    if "float" not in dtype:
        raise _no_classes(model, plan, f"values of dtype {dtype}")
    if model.categories and len(model.categories) != shape[1]:
        raise _no_classes(
            model,
            plan,
            f"{shape[1]:,} numbers for each sample, and has {len(model.categories):,} class names",
        )
    return ClassOutput(model.model_id, name, int(shape[1]), model.categories)


def _no_classes(model: Model, plan: ExtractionPlan, what: str) -> ValueError:
    listed = ", ".join(f"{name} {one.dtype} {one.shape}" for name, one in plan.feature_maps.items())
    return ValueError(
        f"{model.model_id} ({model.family}) returns no scores of classes but {what}: "
        f"{shortened(listed, 400)}; expected one value of shape (batch, classes). "
        f'client.extract({model.model_id!r}, inputs, "/out") returns its output as it is'
    )


def next_token_output(model_id: str, plan: ExtractionPlan) -> ClassOutput | None:
    """Return where a causal model has its scores of tokens, (batch, tokens, vocabulary); None without scores.

    Whether the model is one, the server says: it reads no lens on others.

    Args:
        model_id: The model.
        plan: A dry run of its output.
    """
    scores = plan.feature_maps.get(LOGITS)
    if scores is None or "float" not in scores.dtype:
        return None
    return ClassOutput(model_id, LOGITS, int(scores.shape[-1]), (), True)


NEXT = "next tokens"
"""The alias of a lens on the scores of the next token."""


def next_token_tap(output: ClassOutput, top: int) -> Tap:
    """Return the tap of the most likely tokens behind each text."""
    count, last = min(check_top(top), output.count), positions(prompt=[-1])
    return lens(output.selector, top_k=count, positions=last, alias=NEXT)


def next_scores(maps: FeatureMaps, selector: str) -> tuple[Array | None, Mapping[int, str], FeatureMaps]:
    """Return the scores of the next token of each text, (batch, vocabulary), texts of tokens, and the rest.

    Args:
        maps: A batch with the tap of `next_token_tap`.
        selector: Of the scores, (batch, tokens, vocabulary); None where they are not among the maps.
    """
    texts = maps.info[f"{NEXT}{IDS}"].token_texts
    values, scores = maps.get(selector), None
    if values is not None:
        rows = maps.samples(selector) if any(one.padded_length for one in maps.processed) else list(values)
        scores = np.stack([row[-1] for row in rows])
    return scores, texts, maps.without((NEXT, f"{NEXT}{IDS}"))


class NextTokenCollector:
    """Collects the most likely next tokens of texts, batch by batch.

    Args:
        output: Where their scores come from.
        activation: How these become probabilities; a softmax.

    Raises:
        ValueError: Another activation.
    """

    def __init__(self, output: ClassOutput, activation: Activation) -> None:
        if check_activation(activation) != "softmax":
            raise ValueError(
                f'{output.model_id} predicts the next token, by activation="softmax" alone; '
                f"client.extract({output.model_id!r}, inputs, {output.selector!r}) returns its scores"
            )
        self._output = output
        self._samples: list[Prediction] = []

    def add(self, maps: FeatureMaps, label: Callable[[int], str]) -> None:
        """Add the lens of a batch at the last position of each text; `label` as in `PredictionCollector.add`.

        Raises:
            ValueError: The output has a NaN.
        """
        for position, rows in enumerate(maps.lens(NEXT)):
            sample = label(position) or f"sample {len(self._samples)}"
            scores = tuple(
                ClassScore(token.token_id, token.text, float(np.exp(token.logprob))) for token in rows[-1]
            )
            if any(np.isnan(one.score) for one in scores):
                model = self._output.model_id
                raise ValueError(f"{sample}: the output of {model} has NaN, so no token is the most likely")
            self._samples.append(Prediction(sample, scores))

    def result(self) -> Predictions:
        """Return what was collected.

        Raises:
            ValueError: There was no sample.
        """
        if not self._samples:
            raise ValueError(_EMPTY)
        return Predictions(tuple(self._samples), self._output.model_id, "softmax", self._output.count)


class PredictionCollector:
    """Collects the best classes of samples, batch by batch.

    Args:
        output: Where the scores come from.
        top: Number of classes for each sample.
        activation: How scores become probabilities.
    """

    def __init__(self, output: ClassOutput, top: int, activation: Activation) -> None:
        self._output = output
        self._activation: Activation = check_activation(activation)
        self._top = min(check_top(top), output.count)
        self._found: list[Prediction] = []
        self.token_texts: dict[int, str] = {}
        """Of the next token: the texts of the likely ones, by number."""
        if activation == "softmax" and output.count == 1:
            raise ValueError(
                f"{output.model_id} returns one number for each sample, of which the softmax is always 1; "
                'activation="sigmoid" is the probability of two classes that exclude each other'
            )

    def add(self, values: Array, label: Callable[[int], str]) -> Array:
        """Add a batch, and return the scores of all classes, (samples, classes).

        Args:
            values: The model's output for it.
            label: Names the sample at a position of the batch; empty where it has no name.

        Raises:
            ValueError: The output is not (batch, classes), or has a NaN.
        """
        rows = activated(self._output.checked(float_array(values)), self._activation)
        for position, row in enumerate(rows):
            sample = label(position) or f"sample {len(self._found)}"
            if np.isnan(row).any():
                model = self._output.model_id
                raise ValueError(
                    f"{sample}: the output of {model} has NaN or infinities, so no class is the best; "
                    f"client.dead_channels({model!r}, inputs) shows where they begin"
                )
            self._found.append(Prediction(sample, self._best(row)))
        return rows

    def counterpart(self, other: PredictionCollector, number: int, scores: Array) -> int | None:
        """Return the class here that a class of another model is, by name where their names differ.

        Args:
            other: The other model's.
            number: The class there.
            scores: Those of a sample here; of several classes of that name, the best is returned.
        """
        if self._output.is_of_tokens:
            return number if self._output.count == other._output.count else None
        mine, theirs = self._output.names, other._output.names
        if mine and theirs and mine != theirs:
            same = [place for place, name in enumerate(mine) if name == theirs[number]]
            return max(same, key=lambda place: float(scores[place]), default=None)
        return number if self._output.count == other._output.count else None

    def result(self) -> Predictions:
        """Return what was collected.

        Raises:
            ValueError: There was no sample.
        """
        if not self._found:
            raise ValueError(_EMPTY)
        output = self._output
        return Predictions(tuple(self._found), output.model_id, self._activation, output.count)

    def _best(self, row: Array) -> tuple[ClassScore, ...]:
        names: Mapping[int, str] = self.token_texts or dict(enumerate(self._output.names))
        numbers = np.argsort(-row, kind="stable")[: self._top]
        return tuple(
            ClassScore(int(number), names.get(int(number), ""), float(row[number])) for number in numbers
        )


def check_top(top: object) -> int:
    """Return it.

    Raises:
        ValueError: It is no positive integer.
    """
    if isinstance(top, bool) or not isinstance(top, int) or top < 1:
        raise ValueError(f"top={top!r} must be a positive integer")
    return top


def check_activation(activation: Activation) -> Activation:
    """Return it.

    Raises:
        ValueError: There is no such activation.
    """
    if activation not in get_args(Activation):
        raise ValueError(f"activation {not_one_of(activation, get_args(Activation))}")
    return activation


def activated(values: Array, activation: Activation) -> Array:
    """Return scores in float64: a softmax over the classes, a sigmoid of each, or the values themselves."""
    rows = values.astype(np.float64)
    if activation == "none":
        return rows
    with np.errstate(invalid="ignore", over="ignore"):
        if activation == "sigmoid":
            return np.asarray(np.exp(-np.logaddexp(0.0, -rows)))
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=1, keepdims=True))
