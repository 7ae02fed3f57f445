"""Shapes that are known before a pass: what depends on the length of a text is not among them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trocar_server.surgery import record_calls
from trocar_server.training.losses.loss_values import known_shapes
from trocar_server.training.spec.trainer_spec import LossSpec

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
    found = known_shapes(losses, recording, is_same_size=False, of_texts=True, varying={TOKENS})
    assert found == {selector: expected}
