from typing import Any

import pytest
import torch

from trocar_server.tensors.bits import same_bits

NAN, ZERO = float("nan"), torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "other", "are_same"),
    [
        (torch.tensor([NAN, 1.0]), torch.tensor([NAN, 1.0]), True),
        (ZERO, -ZERO, False),
        (ZERO, torch.zeros(2, dtype=torch.int32), False),
        (ZERO, torch.zeros(2, 1), False),
        (torch.eye(3)[:, 1], torch.eye(3)[1], True),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.tensor(1.0), torch.tensor(1.0, requires_grad=True), True),
    ],
)
def test_bits_are_compared_and_not_numbers(value: Any, other: Any, are_same: bool) -> None:
    assert same_bits(value, other) is are_same
