"""Late imports: two threads never see half of torch's compiler."""

import subprocess
import sys

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
