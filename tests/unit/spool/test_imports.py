"""The spool alone costs a program torch and little else."""

import subprocess
import sys

PROGRAM = """
import sys
import torch
before = set(sys.modules)
from trocar_server.spool import Spool
print(*sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""


def test_importing_it_imports_nothing_of_the_server_or_of_others() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    others = set(ended.stdout.split()) - set(sys.stdlib_module_names)
    assert others <= {"numpy", "trocar_server", "trocar_api"}  # of the last, how sizes are written
