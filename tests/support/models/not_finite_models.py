"""Models in which a NaN or an infinity appears for some inputs, and whose values need not show it."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

WIDTH = 8

Step = Callable[[torch.Tensor], torch.Tensor]


def _attention(x: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    scores = (x.unsqueeze(-1) * x.unsqueeze(-2)).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ x.unsqueeze(-1)).squeeze(-1)


APPEARING: dict[str, Step] = {
    "logarithm": torch.log,
    "method": lambda x: x.sqrt(),
    "in place": lambda x: (x * 1).log_(),
    "quotient": lambda x: x.clamp(min=0) / x.clamp(min=0),
    "reciprocal": lambda x: 1 / x.clamp(min=0),
    "power": lambda x: x**0.5,
    "difference of infinities": lambda x: (x * -300).exp() - (x * -300).exp(),
    "constant": lambda x: torch.where(x > 0, x, float("nan")),
    "nothing left": lambda x: _attention(x, (x < 0).any(-1)[:, None, None].expand(-1, WIDTH, WIDTH)),
    "own infinities": lambda x: (
        (x + torch.where(x > 0, 0.0, float("inf"))) - torch.where(x > 0, 0.0, float("inf"))
    ),
}
"""By name, a step in which something that is not finite appears where a number is negative."""

HIDING: dict[str, Step] = {
    "relu": functional.relu,
    "clamp": lambda x: x.clamp(-1, 1),
    "max": lambda x: x.reshape(-1, WIDTH // 2, 2).amax(-1),
    "order": lambda x: x.topk(2, -1).values,
    "comparison": lambda x: (x > 0).float(),
}
"""By name, a step behind which OpenVINO may show none of it."""

FINITE: dict[str, Step] = {
    "causal mask": lambda x: _attention(x, torch.ones(WIDTH, WIDTH).triu(1) == 1),
    "smallest mask": lambda x: (
        (x.unsqueeze(1) + torch.full((WIDTH, WIDTH), -3e38).triu(1)).softmax(-1).sum(1)
    ),
    "square": lambda x: x**2 / 2,
    "norm": lambda x: functional.layer_norm(x, (WIDTH,)),
    "softmax": lambda x: x.softmax(-1),
}
"""By name, a step that keeps what is finite."""

OVERFLOWING: dict[str, Step] = {
    "product": lambda x: x * 1e30 * 1e8 - x * 1e30 * 1e8,
    "ninth": lambda x: (x * x * x) ** 3 * 1e-20 - (x * x * x) ** 3 * 1e-20,
}
"""By name, a step that overflows for inputs that are not large."""


class Hiding(nn.Module):
    """A step of `APPEARING`, `FINITE` or `OVERFLOWING`, then one of `HIDING`."""

    def __init__(self, appearing: str, hiding: str = "relu") -> None:
        super().__init__()
        self._step = appearing
        self._hiding = hiding
        self.linear = nn.Linear(WIDTH, WIDTH)
        nn.init.eye_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = APPEARING | FINITE | OVERFLOWING
        found: torch.Tensor = self.last(HIDING[self._hiding](steps[self._step](self.linear(x))))
        return found
