"""Graphs for OpenVINO report what is not finite inside a pass, and nothing else."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchvision.models import get_model

from tests.support.models.not_finite_models import APPEARING, FINITE, HIDING, WIDTH, Hiding
from tests.unit.engine.compiled.backends.nets import out
from trocar_server.engine.compiled.backends.conversion import convert
from trocar_server.engine.compiled.backends.graph_tracing import trace
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner, is_installed
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.execute.executor import NotFiniteError
from trocar_server.engine.request.numerics import Numerics

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs OpenVINO")

ROWS = Recipe((ArgumentSpec(torch.float32, (WIDTH,)),), (out("last"),))
IMAGES = Recipe((ArgumentSpec(torch.float32, (3, 64, 64)),), (out("avgpool"),))
POSITIVE = torch.rand(3, WIDTH, generator=torch.Generator().manual_seed(0)) + 0.5
NEGATIVE = torch.cat([POSITIVE[:2], -POSITIVE[2:]])


def runner(model: nn.Module, folder: Path, numerics: Numerics = Numerics.FAST) -> OpenVinoRunner:
    convert(model, ROWS, folder)
    return OpenVinoRunner(folder, ROWS, numerics, 1)


def eager(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(rows)
    return found


@pytest.mark.parametrize("hiding", HIDING)
@pytest.mark.parametrize("appearing", ["logarithm", "constant"])
def test_whatever_hides_it_it_is_reported(appearing: str, hiding: str, tmp_path: Path) -> None:
    check(Hiding(appearing, hiding).eval(), tmp_path)


@pytest.mark.parametrize("appearing", APPEARING)
def test_whatever_it_is_made_by_it_is_reported(appearing: str, tmp_path: Path) -> None:
    check(Hiding(appearing).eval(), tmp_path)


def check(model: nn.Module, folder: Path) -> None:
    found = runner(model, folder)
    with pytest.raises(NotFiniteError):
        found.run([NEGATIVE])
    assert torch.allclose(found.run([POSITIVE])["last@0"], eager(model, POSITIVE), atol=1e-5)


@pytest.mark.parametrize("step", FINITE)
@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
def test_what_is_finite_is_not_reported(step: str, numerics: Numerics, tmp_path: Path) -> None:
    model = Hiding(step).eval()
    found = runner(model, tmp_path, numerics)
    for rows in (POSITIVE, NEGATIVE, torch.zeros(1, WIDTH), POSITIVE * 1e6):
        wanted, values = eager(model, rows), found.run([rows])["last@0"]
        assert torch.allclose(values, wanted, atol=1e-5 if numerics is Numerics.FAST else 0.02, rtol=0.02)


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_large", "convnext_tiny", "efficientnet_b0"])
def test_usual_networks_pay_nothing(name: str) -> None:
    """Their graphs have no output beside the values."""
    model = get_model(name, weights=None).eval()
    assert len(trace(model, IMAGES).graph_signature.user_outputs) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_converted(value: float, tmp_path: Path) -> None:
    model = Hiding("square").eval()
    with torch.no_grad():
        model.linear.weight[0, 0] = value
    with pytest.raises(ValueError, match="weight' is not finite"):
        convert(model, ROWS, tmp_path)
