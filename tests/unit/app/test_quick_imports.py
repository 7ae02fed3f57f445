"""Imports without `torch._dynamo`: what is left out, and that all of it still works."""

import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

from trocar_server.app.quick_imports import calling_directly, without_dynamo

PROGRAM = """
import sys
from trocar_server.app.quick_imports import without_dynamo
with without_dynamo():
    import torchvision
    import trocar_server.app.app
import torch
def is_there():
    return "torch._dynamo" in sys.modules
assert not is_there()
model = torchvision.models.resnet18().to("meta").eval()
assert model(torch.empty(1, 3, 64, 64, device="meta")).shape == (1, 1000)
assert not is_there()
import torch._dynamo
from torch._dynamo.utils import counters, is_compile_supported
assert "torch/_dynamo/utils" in is_compile_supported.__code__.co_filename
from torchvision.ops import roi_align
assert torchvision.ops.roi_align.__globals__["is_compile_supported"]("cpu") == is_compile_supported("cpu")
doubled = torch.compile(lambda x: x * 2, backend="eager")(torch.ones(3))
assert doubled.tolist() == [2.0, 2.0, 2.0]
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=1.0)
parameter.sum().backward()
optimizer.step()
assert parameter.tolist() == [0.0, 0.0]
"""


def test_neither_torchvision_nor_a_pass_without_data_brings_it_in_and_whoever_needs_it_gets_it() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_process_that_has_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys.modules[__name__])
    before = list(sys.meta_path)
    with without_dynamo():
        assert sys.meta_path == before


@pytest.mark.parametrize("imported", ["not", "being", "is"])
def test_functions_are_called_directly_until_somebody_has_imported_it(
    imported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def original(function: Callable[..., Any], recursive: bool = True) -> Callable[..., Any]:
        return lambda *args: ("disabled", recursive, function(*args))

    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    if imported != "not":
        module = ModuleType("torch._dynamo")
        module.__spec__ = ModuleSpec("torch._dynamo", None)
        module.__spec__._initializing = imported == "being"  # type: ignore[attr-defined]  # as importlib does
        monkeypatch.setitem(sys.modules, "torch._dynamo", module)
    disable = calling_directly(original)

    def double(value: int) -> int:
        return value * 2

    functions = disable(double), disable(recursive=False)(double)
    assert functions[0].__name__ == "double"
    results = [function(4) for function in functions]
    assert results == ([("disabled", True, 8), ("disabled", False, 8)] if imported == "is" else [8, 8])
