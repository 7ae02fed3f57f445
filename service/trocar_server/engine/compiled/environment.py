"""Environment of compiled variants: the software and processor that built them."""

import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import trocar_server
from trocar_server.models.identity import digest_of

_PACKAGES = ("torch", "openvino", "numpy")
_GRAPHS = "graphs with checked indices and numbers"
"""Changes where the outputs of kept graphs do."""
_PROCESSOR_LINES = ("model name", "flags", "Features", "CPU part")
"""Of /proc/cpuinfo, on x86-64 and on ARM."""


@cache
def environment_digest() -> str:
    """Return a digest of versions and processor: a variant is only used where an equal one was built."""
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    machine = [platform.machine(), platform.python_version(), torch.backends.cpu.get_cpu_capability()]
    return digest_of([trocar_server.__version__, _GRAPHS, *versions, *machine, *_processor()])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> Iterator[str]:
    """Yield what tells processors apart: the lines of the first one."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except (OSError, UnicodeDecodeError):
        yield platform.processor()
        return
    for line in first.splitlines():
        if line.split("\t", 1)[0].split(":")[0].strip() in _PROCESSOR_LINES:
            yield line
