"""Imports after the start, of what only some calls need: one thread at a time.

# Note: [Imports by several threads]
Python locks each module by itself while it is imported. torch's compiler imports itself in circles: of two
threads that enter it at different modules, each waits for a module of the other. Python sees that, and gives
one of them a module without its contents: `ImportError`, in both threads. So all enter it by its package, one
after the other.
"""

import sys
from threading import RLock

late_imports = RLock()
"""Held while modules are imported after the start."""


def is_imported(name: str) -> bool:
    """Whether a module is imported completely: to import it again, `late_imports` is not needed."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def import_compiler() -> None:
    """Import torch's compiler, see Note: [Imports by several threads]. It takes 1.2 s and 150 MB."""
    if is_imported("torch._dynamo"):
        return
    with late_imports:
        import torch._dynamo  # noqa: F401
