"""Callers that store nothing: extractions, merged ones, streams. Answers are plain torch's, bit by bit."""

import random

import numpy as np
import torch

import trocar
from tests.support.killing.moments import Moments
from tests.support.models.tiny_models import Plain
from tests.support.servers.serving import rebuilt

SHAPE = (3, 16, 16)
TAPS = ("conv", "fc")
COMPILED, MERGED = "compiled pass", "merged pass"
"""What is said of passes that were not eager, and of those of several calls."""
_SEEDS, _LARGEST = 4, 8
Arrays = dict[str, np.ndarray]


def inputs_of(batch: int, seed: int) -> np.ndarray:
    """Return a batch (batch, *SHAPE)."""
    return np.random.default_rng(seed).standard_normal((batch, *SHAPE), np.float32)


class Answers:
    """What plain torch answers; each question is computed once."""

    def __init__(self) -> None:
        self._model = rebuilt(Plain)
        self._known: dict[tuple[int, int], Arrays] = {}

    def of(self, batch: int, seed: int) -> Arrays:
        """Return the values of `TAPS`."""
        if (batch, seed) not in self._known:
            with torch.no_grad():
                x = torch.from_numpy(inputs_of(batch, seed))
                values = {"conv": self._model.conv(x), "fc": self._model(x)}
            self._known[batch, seed] = {name: value.numpy() for name, value in values.items()}
        return self._known[batch, seed]


class Extracting:
    """Extractions.

    Args:
        name: Whose.
        moments: Told of each call.
        model_id: What to ask.
        is_exact: Whether answers have to be equal bit by bit.
        seed: Of its choices.
    """

    def __init__(self, name: str, moments: Moments, model_id: str, is_exact: bool, seed: int) -> None:
        self.name = name
        self._moments, self._model_id, self._is_exact = moments, model_id, is_exact
        self._chance, self._answers = random.Random(seed), Answers()

    def _question(self) -> tuple[int, int]:
        return self._chance.randint(1, _LARGEST), self._chance.randrange(_SEEDS)

    def work(self, client: trocar.Client) -> None:
        """Ask one question."""
        question = self._question()
        with self._moments.of(self.name):
            found = client.extract(self._model_id, inputs_of(*question), TAPS)
        self._compare(question, found)
        if found.execution.engine != "eager":
            self._moments.say(COMPILED)
        if found.execution.row_count > question[0]:
            self._moments.say(MERGED)

    def check(self, client: trocar.Client) -> None:
        """Ask all questions of one seed."""
        for batch in range(1, _LARGEST + 1):
            self._compare((batch, 0), client.extract(self._model_id, inputs_of(batch, 0), TAPS))

    def _compare(self, question: tuple[int, int], found: trocar.FeatureMaps) -> None:
        for name, expected in self._answers.of(*question).items():
            if self._is_exact:
                assert found[name].tobytes() == expected.tobytes(), f"another answer: {question} at {name}"
            else:
                np.testing.assert_allclose(found[name], expected, rtol=1e-4, atol=1e-5)


class Streaming(Extracting):
    """Streams of a few batches."""

    def work(self, client: trocar.Client) -> None:
        """Ask several questions in one call."""
        asked = [self._question() for _ in range(self._chance.randint(2, 12))]
        batches = [inputs_of(*question) for question in asked]
        with (
            self._moments.of(self.name),
            client.extract_stream(self._model_id, batches, list(TAPS)) as results,
        ):
            for question, result in zip(asked, results, strict=True):
                self._compare(question, result.unwrap())
