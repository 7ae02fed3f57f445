"""Late imports: two threads never see half of torch's compiler."""

import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest

from trocar_server import late_imports
from trocar_server.models import timm_models

# The first thread has begun torch's compiler when the second begins with a module of its own.
PROGRAM = """
import importlib.abc, sys, threading
from trocar_server.app.quick_imports import without_dynamo

with without_dynamo():
    from trocar_server.late_imports import import_compiler
    from trocar_server.surgery.recording.symbolic import import_symbolic_parts
import torch.fx.experimental.symbolic_shapes

begun, both = threading.Event(), threading.Event()

class Pausing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.startswith("torch._dynamo."):
            begun.set()
            both.wait()
        return None

def second():
    begun.wait()
    both.set()
    import_symbolic_parts()

assert "torch._dynamo" not in sys.modules
sys.meta_path.insert(0, Pausing())
threads = [threading.Thread(target=one) for one in (import_compiler, second)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_two_threads_import_torchs_compiler_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True, text=True)
    assert "ImportError" not in done.stderr


class Busy:
    """The lock while another thread imports: who wants it would wait."""

    def __init__(self, wanted: list[str]) -> None:
        self._wanted = wanted

    def __enter__(self) -> None:
        self._wanted.append("lock")

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def wanted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    for module in (late_imports, timm_models):
        monkeypatch.setattr(module, "late_imports", Busy(found))
    return found


def test_what_is_imported_already_waits_for_no_import_of_another_thread(wanted: list[str]) -> None:
    import timm  # noqa: F401
    import torch._dynamo  # noqa: F401

    timm_models.check_timm("test_vit")
    late_imports.import_compiler()
    assert wanted == []


def test_what_is_being_imported_is_waited_for(wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    half: Any = ModuleType("timm")
    half.__spec__ = type("Spec", (), {"_initializing": True, "name": "timm"})()
    half.is_model = {"test_vit"}.__contains__
    monkeypatch.setitem(sys.modules, "timm", half)
    timm_models.check_timm("test_vit")
    assert wanted == ["lock"]
