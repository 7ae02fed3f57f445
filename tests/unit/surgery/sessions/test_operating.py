"""Taps and edits of one pass together: what one session does is not a call of the model for another."""

import torch
from torch import nn

from trocar_server.surgery import Collector, EditTarget, FunctionSession, Surgery, Target, operate
from trocar_server.tensors.edits import Edit, Swap

ROWS = torch.randn(2, 3, generator=torch.Generator().manual_seed(1))


class Clones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).clone())
        return result


def test_the_copy_of_a_swaps_value_is_not_a_call_of_the_model() -> None:
    model, collector = Clones().requires_grad_(False), Collector(ends_pass=False)
    swapped = Target("first/in", "first", 0, "in", (0,), clone=True)
    edit = EditTarget(Target("second", "second", 0), Edit(Swap(selector="first/in")), found="first/in")
    clone = FunctionSession([Target("fn:clone", "clone", 0, kind="fn")], collector)
    with operate(model, Surgery((edit,), inner=(swapped,)), [], collector), clone:
        result = model(ROWS)
    assert torch.equal(collector.values["fn:clone"], model.first(ROWS))
    assert clone.call_counts is not None
    assert clone.call_counts["clone"] == 1
    assert torch.equal(result, ROWS)
