"""A model's own activation checkpointing, against the same model without it."""

import ast
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import trocar_server
from trocar_server.engine.execute.collecting import PassSpec, collect
from trocar_server.engine.execute.scoring import Scoring
from trocar_server.engine.request.objective import Objective, Term, ValueScore
from trocar_server.surgery import EditTarget, GradientPoint, PassGuard, Surgery, Target, parse_selector
from trocar_server.surgery.sessions import recomputation
from trocar_server.tensors.edits import Edit, Scale

ROWS = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))
PLACES = {
    "output": Target("block.0", "block.0", 0),
    "input": Target("block.2/in", "block.2", 0, "in", (0,)),
    "parameter": Target("block.0/param(weight)", "block.0", 0, "param(weight)"),
}
IN = Target("/grad_in", "", 0, "in", (0,), is_gradient=True)
INSIDE = Target("block.1/grad_out", "block.1", 0, is_gradient=True)


class Saving(nn.Module):
    """A block that is recomputed in the backward pass, or not."""

    def __init__(self, *, is_saving: bool, use_reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.is_saving = is_saving
        self.use_reentrant = use_reentrant
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
        self.fc = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        if self.is_saving:
            return self.fc(checkpoint(self.block, x, use_reentrant=self.use_reentrant))
        return self.fc(self.block(x))


def gradients(model: nn.Module, edits: tuple[EditTarget, ...]) -> dict[str, torch.Tensor]:
    scoring = Scoring(
        Objective((Term(1.0, ValueScore(parse_selector("fc"))),)), (Target("score", "fc", 0),), (), ()
    )
    surgery = Surgery(before=edits, points=(GradientPoint(IN), GradientPoint(INSIDE)))
    with torch.no_grad():
        return collect(model, ([ROWS.clone()], {}), PassSpec([], surgery, scoring), PassGuard()).values


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("place", [None, *PLACES])
def test_a_checkpointed_part_has_the_gradients_of_its_edited_pass(
    place: str | None, use_reentrant: bool
) -> None:
    edits = () if place is None else (EditTarget(PLACES[place], Edit(Scale(3.0))),)
    expected, found = (
        gradients(Saving(is_saving=each, use_reentrant=use_reentrant).eval().requires_grad_(False), edits)
        for each in (False, True)
    )
    assert found.keys() == expected.keys() == {"/grad_in", "block.1/grad_out"}
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_goes_on_outside_of_a_pass(use_reentrant: bool) -> None:
    model, calls = Saving(is_saving=True, use_reentrant=use_reentrant), []
    gradients(model.eval().requires_grad_(False), ())
    model.block.register_forward_pre_hook(lambda *_: calls.append(1))
    model(ROWS.clone().requires_grad_()).sum().backward()
    assert len(calls) == 2


def test_an_unknown_generator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recomputation, "_install", lambda: False)
    with pytest.raises(RuntimeError, match="switch checkpointing off"):
        gradients(Saving(is_saving=True).eval().requires_grad_(False), ())


def test_every_backward_pass_of_the_server_is_in_one_of_the_two_contexts() -> None:
    source = Path(trocar_server.__file__).parent
    files = {path.relative_to(source).as_posix(): path.read_text() for path in source.rglob("*.py")}
    calls = {name: _backward_calls(ast.parse(text)) for name, text in files.items()}
    assert {name: found for name, found in calls.items() if found} == {
        "engine/execute/collecting.py": ["gradients.backward"],
        "surgery/sessions/gradients.py": ["torch.autograd.grad", "torch.autograd.grad"],
        "training/step/training_pass.py": ["(loss / share if share > 1 else loss).backward"],
    }
    assert "without_recomputation()," in files["engine/execute/collecting.py"]
    assert "enter_context(self._checkpointing)" in files["training/step/training_pass.py"]
    assert "with NoReruns(" in files["engine/execute/collecting.py"]
    assert "enter_context(self._no_reruns)" in files["training/step/training_pass.py"]
    patched = [name for name, text in files.items() if "CheckpointFunction" in text]
    assert patched == ["surgery/sessions/recomputation.py"]


def _backward_calls(tree: ast.AST) -> list[str]:
    calls = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [call for call in calls if call.endswith((".backward", "autograd.grad"))]


class NestedSaving(Saving):
    """A checkpointed part with another one inside."""

    def forward(self, x: torch.Tensor) -> Any:
        if not self.is_saving:
            return self.fc(self.block(x))
        return self.fc(checkpoint(self._outer, x, use_reentrant=self.use_reentrant))

    def _outer(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_in_a_thread_of_autograd_is_as_the_first_forward(use_reentrant: bool) -> None:
    found = []
    for is_saving in (False, True):
        model = NestedSaving(is_saving=is_saving, use_reentrant=use_reentrant)
        with recomputation.RecomputationInGraph(lambda _: nullcontext):
            loss = model(ROWS.clone()).square().sum()
        thread = threading.Thread(target=loss.backward)  # as on a GPU
        thread.start()
        thread.join()
        found.append([parameter.grad for parameter in model.parameters()])
    for expected, computed in zip(*found, strict=True):
        assert expected is not None
        assert computed is not None
        assert torch.equal(computed, expected)
