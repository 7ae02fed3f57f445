"""Shapes that are known before a pass: what depends on the length of a text or a sound is not among them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trocar_server.surgery import record_calls
from trocar_server.training.losses.class_dims import ClassDims
from trocar_server.training.losses.loss_values import known_shapes
from trocar_server.training.spec.trainer_spec import LossSpec, TeacherSpec

TOKENS, CLASSES = 8, 5


class Tagged(nn.Module):
    """Scores of each token, and a score for each token: (batch, tokens, classes) and (batch, tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Embedding(30, CLASSES)

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        scores = self.scores(ids)
        return {"of_tokens": scores, "of_classes": scores.transpose(1, 2), "start": scores[..., 0]}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cross_entropy", "of_classes", (None, CLASSES, None)),
        ("cross_entropy", "of_tokens", (None, None, None)),
        ("cross_entropy", "start", (None, None)),
        ("token_cross_entropy", "of_tokens", (None, None, CLASSES)),
        ("kl_div", "of_tokens", (None, None, CLASSES)),
        ("mse", "start", (None, None)),
    ],
)
def test_sizes_of_texts_of_any_length(name: Any, value: str, expected: tuple[int | None, ...]) -> None:
    selector = f'/out["{value}"]'
    recording = record_calls(Tagged(), [torch.zeros(1, TOKENS, dtype=torch.int64)], {}, is_symbolic=False)
    losses = [LossSpec(name=name, selector=selector)]
    found = known_shapes(
        losses,
        recording,
        is_same_size=False,
        class_dims=ClassDims(lambda _: None, of_texts=True),
        varying={TOKENS},
    )
    assert found == {0: expected}


class Framed(nn.Module):
    """Scores of each frame of a sound: (batch, frames, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Conv1d(1, CLASSES, 10, stride=10)

    def forward(self, samples: Tensor) -> Tensor:
        scores: Tensor = self.scores(samples[:, None])
        return scores.transpose(1, 2)


SAMPLES = 800


def shapes_of_sound(*losses: LossSpec) -> dict[int, Any]:
    recording = record_calls(Framed(), [torch.zeros(1, SAMPLES)], {}, is_symbolic=False)
    return dict(
        known_shapes(
            losses, recording, is_same_size=False, class_dims=ClassDims(lambda _: None), varying={SAMPLES}
        )
    )


@pytest.mark.parametrize("name", ["bce_with_logits", "mse", "l1", "huber"])
def test_the_number_of_frames_is_not_that_of_classes(name: Any) -> None:
    assert shapes_of_sound(LossSpec(name=name)) == {0: (None, None, None)}


def test_terms_on_one_value_have_their_own_shapes() -> None:
    """What a teacher is compared with is not known before the pass, nor needed."""
    taught = LossSpec(name="mse", teacher=TeacherSpec(model_id="t"))
    labelled, transposed = LossSpec(name="token_cross_entropy"), LossSpec(name="cross_entropy")
    frames = SAMPLES // 10
    assert shapes_of_sound(labelled, taught, LossSpec(name="l2_norm"), transposed) == {
        0: (None, None, CLASSES),
        3: (None, frames, None),
    }
