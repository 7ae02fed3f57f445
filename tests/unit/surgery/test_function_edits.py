"""Changing what functions take and return: attention heads and scores, in-between values."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from trocar_server.surgery import Collector, EditTarget, FunctionSession, Target
from trocar_server.tensors.edits import Add, Edit, Region, Scale, Zero
from trocar_server.tensors.reductions import Axis, Take

ROWS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))


class Heads(nn.Module):
    """Attention with two heads, with the steps apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


def by_hand(scores_of: object = None, mixed_of: object = None) -> torch.Tensor:
    model = Heads()
    with torch.no_grad():
        parts = model.project(ROWS).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        scores: Any = (query @ key.transpose(-2, -1) / 2).softmax(-1)
        scores = scores_of(scores) if callable(scores_of) else scores
        mixed: Any = scores @ value
        mixed = mixed_of(mixed) if callable(mixed_of) else mixed
        result: torch.Tensor = model.out(mixed.transpose(1, 2).flatten(2))
    return result


def at(port: str, picks: tuple[int | str, ...] = ()) -> Target:
    return Target("attention", "scaled_dot_product_attention", 0, port, picks, kind="fn")


HEAD = Region(takes=(Take(Axis.CHANNELS, (1,)),))


def run(*edits: EditTarget) -> torch.Tensor:
    with torch.no_grad():
        return within(FunctionSession([], Collector(), None, edits), Heads())


def within(session: FunctionSession, model: nn.Module) -> torch.Tensor:
    """Run a model inside a session; a session may end a pass early, so its result is not sure."""
    results: list[torch.Tensor] = []
    with session:
        results.append(model(ROWS))
    return results[0]


def without_head(value: torch.Tensor) -> torch.Tensor:
    return torch.stack([value[:, 0], torch.zeros_like(value[:, 1])], dim=1)


def test_a_head_is_taken_away_at_the_output_of_attention() -> None:
    found = run(EditTarget(at("out"), Edit(Zero(), HEAD)))
    torch.testing.assert_close(found, by_hand(mixed_of=without_head))


def test_scores_that_are_changed_lead_to_another_output() -> None:
    found = run(EditTarget(at("scores"), Edit(Zero(), HEAD)))
    torch.testing.assert_close(found, by_hand(scores_of=without_head))


def test_what_a_function_takes_is_changed() -> None:
    found = run(EditTarget(at("in", (2,)), Edit(Scale(3.0))))
    torch.testing.assert_close(found, by_hand(mixed_of=lambda mixed: mixed * 3))


def test_taps_stand_between_edits_before_and_after() -> None:
    collector = Collector(ends_pass=False)
    before, after = [EditTarget(at("out"), Edit(Add(1.0)))], [EditTarget(at("out"), Edit(Zero()))]
    plain = Collector(ends_pass=False)
    with torch.no_grad():
        found = within(FunctionSession([at("out")], collector, None, before, after), Heads())
        within(FunctionSession([at("out")], plain), Heads())
    assert torch.equal(collector.values["attention"], plain.values["attention"] + 1)
    torch.testing.assert_close(found, by_hand(mixed_of=torch.zeros_like))


def test_the_functions_of_an_edit_are_not_counted_as_the_models() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mul(torch.mul(x, 2), 3)

    edits = [
        EditTarget(Target("first", "mul", 0, kind="fn"), Edit(Scale(5.0))),
        EditTarget(Target("second", "mul", 1, kind="fn"), Edit(Add(1.0))),
    ]
    with FunctionSession([], Collector(), None, edits):
        assert torch.equal(Scaled()(ROWS), ROWS * 2 * 5 * 3 + 1)
