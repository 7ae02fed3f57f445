"""Changing what functions take and return: attention heads and scores, in-between values."""

from collections.abc import Callable
from itertools import permutations

import pytest
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


Change = Callable[[torch.Tensor], torch.Tensor]


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def by_hand(scores_of: Change = same, mixed_of: Change = same, logits_of: Change = same) -> torch.Tensor:
    model = Heads()
    with torch.no_grad():
        parts = model.project(ROWS).chunk(3, -1)
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in parts)
        scores = scores_of(logits_of(query @ key.transpose(-2, -1) / 2).softmax(-1))
        mixed = mixed_of(scores @ value)
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


FLOW = {"logits": (Scale(3.0), "logits_of"), "scores": (Zero(), "scores_of"), "out": (Add(1.0), "mixed_of")}
"""An edit at each port of attention, of its second head, and the argument of `by_hand` that does the same."""


def edit_at(port: str) -> EditTarget:
    return EditTarget(at(port), Edit(FLOW[port][0], HEAD))


def flow_by_hand(*ports: str) -> torch.Tensor:
    changes: dict[str, Change] = {
        "logits_of": lambda logits: torch.stack([logits[:, 0], logits[:, 1] * 3], dim=1),
        "scores_of": without_head,
        "mixed_of": lambda mixed: torch.stack([mixed[:, 0], mixed[:, 1] + 1], dim=1),
    }
    wanted = [FLOW[port][1] for port in ports]
    return by_hand(**{name: change for name, change in changes.items() if name in wanted})


ORDERS = [order for count in (2, 3) for order in permutations(FLOW, count)]


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_edits_of_one_attention_run_in_execution_order_whatever_their_list(order: tuple[str, ...]) -> None:
    torch.testing.assert_close(run(*map(edit_at, order)), flow_by_hand(*order))


@pytest.mark.parametrize("late", [*FLOW, "logits scores", "scores out", "logits out"])
def test_an_edit_after_the_taps_undoes_no_other_of_its_attention(late: str) -> None:
    after = [edit_at(port) for port in FLOW if port in late]
    before = [edit_at(port) for port in reversed(FLOW) if port not in late]
    with torch.no_grad():
        found = within(FunctionSession([], Collector(), None, before, after), Heads())
    torch.testing.assert_close(found, flow_by_hand(*FLOW))


def taps_of(before: list[EditTarget], after: list[EditTarget]) -> dict[str, torch.Tensor]:
    collector = Collector(ends_pass=False)
    targets = [Target(port, "scaled_dot_product_attention", 0, port, kind="fn") for port in FLOW]
    with torch.no_grad():
        within(FunctionSession(targets, collector, None, before, after), Heads())
    return collector.values


@pytest.mark.parametrize("port", FLOW)
def test_taps_before_an_edit_of_attention_see_the_original_and_those_behind_it_the_change(port: str) -> None:
    plain, early, late = taps_of([], []), taps_of([edit_at(port)], []), taps_of([], [edit_at(port)])
    place = list(FLOW).index(port)
    for other in list(FLOW)[:place]:
        assert torch.equal(early[other], plain[other])
        assert torch.equal(late[other], plain[other])
    assert torch.equal(late[port], plain[port])
    assert not torch.equal(early[port], plain[port])
    for other in list(FLOW)[place + 1 :]:
        assert torch.equal(early[other], late[other])
        assert not torch.equal(late[other], plain[other])


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
