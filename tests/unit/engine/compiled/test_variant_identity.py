"""Digests of models, by which kept variants are found."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.tiny_models import Plain
from trocar_server.engine.compiled.variant_identity import UnknownCodeError, model_digest
from trocar_server.models import HostedModel, ModelSpec, load_model

CODE = """
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
    def forward(self, x):
        return self.fc(x) * {factor}
"""


def hosted(weights: str = "random:0") -> HostedModel:
    name = f"{Plain.__module__}:{Plain.__qualname__}"
    return load_model(
        ModelSpec("tiny", name, weights, input_shape=(3, 8, 8)), torch.device("cpu"), Path("nowhere")
    )


def with_module(module: nn.Module) -> HostedModel:
    return replace(hosted(), module=module)


def test_equal_models_have_equal_digests_under_any_id() -> None:
    first = hosted()
    renamed = replace(hosted(), spec=replace(first.spec, model_id="other"))
    assert model_digest(first) == model_digest(renamed)


def test_other_weights_structure_or_settings_have_another_digest() -> None:
    torch.manual_seed(0)
    weights = nn.Linear(3, 3).state_dict()
    nets: list[Callable[[], nn.Module]] = [
        nn.ReLU,
        nn.GELU,
        lambda: nn.LeakyReLU(0.1),
        lambda: nn.LeakyReLU(0.2),
    ]
    digests = {model_digest(hosted()), model_digest(hosted("random:1"))}
    for net in nets:
        module = nn.Sequential(nn.Linear(3, 3), net())
        module[0].load_state_dict(weights)
        digests.add(model_digest(with_module(module)))
    spec = replace(hosted().spec, options={"scale": 2})
    digests.add(model_digest(replace(hosted(), spec=spec)))
    assert len(digests) == 7


def test_other_code_of_a_module_has_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for factor in (1, 2):
        path = tmp_path / str(factor) / "own_net.py"
        path.parent.mkdir()
        path.write_text(CODE.format(factor=factor))
        spec = importlib.util.spec_from_file_location("own_net", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own_net", module)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        digests.add(model_digest(with_module(module.Own())))
    assert len(digests) == 2


def test_code_that_is_in_no_file_has_none() -> None:
    space: dict[str, Any] = {"__name__": "typed_in"}
    exec(CODE.format(factor=1), space)
    with pytest.raises(UnknownCodeError):
        model_digest(with_module(space["Own"]()))
