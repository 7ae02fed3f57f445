"""Import of torch and torchvision without `torch._dynamo`, which eager execution does not need.

    with without_dynamo():
        import torchvision

Its import takes 1.2 s and 150 MB: a third of a server's start on two cores. Two places import it:

- `torch._compile._disable_dynamo` wraps functions that a compiler must leave alone, those of the meta device
  among them, and imports the compiler at the first call. As long as the compiler is not imported, the
  function can be called directly.
- `torchvision.ops.roi_align` imports one function of it, which is called much later, if at all.

If a version of torch has neither, nothing is changed. Only `trocar serve` does this, because it owns its
process.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_UTILS = "torch._dynamo.utils"


@contextmanager
def without_dynamo() -> Iterator[None]:
    """Keep imports inside the context from importing `torch._dynamo`; it can still be imported later."""
    if "torch" in sys.modules:
        yield
        return
    finder = _CompileFinder()
    stand_in = ModuleType(_UTILS)
    stand_in.is_compile_supported = _is_compile_supported  # type: ignore[attr-defined]
    sys.meta_path.insert(0, finder)
    sys.modules[_UTILS] = stand_in
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        if sys.modules.get(_UTILS) is stand_in:
            del sys.modules[_UTILS]


def _is_compile_supported(device_type: str) -> bool:
    """Delegate to torch's own function of this name."""
    return bool(importlib.import_module(_UTILS).is_compile_supported(device_type))


def calling_directly(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `_disable_dynamo` whose functions call theirs directly until `torch._dynamo` is imported.

    Args:
        original: torch's own, used once `torch._dynamo` has been imported.
    """

    def disable(function: Callable[..., Any] | None = None, recursive: bool = True) -> Any:
        if function is None:
            return functools.partial(disable, recursive=recursive)
        disabled = original(function, recursive)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (disabled if _is_imported() else function)(*args, **kwargs)

        return call

    return disable


def _is_imported() -> bool:
    """Whether `torch._dynamo` is there; not while another thread imports it: its user would wait."""
    module = sys.modules.get(_DYNAMO)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


class _CompileFinder(importlib.abc.MetaPathFinder):
    """Import hook for `torch._compile`: patches its one function after the module has executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of `torch._compile` with a loader around its own; None for all others."""
        if fullname != "torch._compile":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _ChangingLoader(spec.loader)
        return spec


class _ChangingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        original = getattr(module, "_disable_dynamo", None)
        if original is not None:
            module._disable_dynamo = calling_directly(original)  # type: ignore[attr-defined]
