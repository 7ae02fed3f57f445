"""Identity of compiled variants: digests of the model, and of the software and processor that built them."""

import hashlib
import inspect
import json
import platform
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from torch import Tensor, nn

import trocar_server
from trocar_server.models import HostedModel
from trocar_server.storage.fingerprint import fingerprint

_PACKAGES = ("torch", "openvino", "numpy")
_GRAPHS = "graphs with checked indices and numbers"
"""Changes where the outputs of kept graphs do."""
_PROCESSOR_LINES = ("model name", "flags", "Features", "CPU part")
"""Of /proc/cpuinfo, on x86-64 and on ARM."""


class UnknownCodeError(Exception):
    """The source of a module's class cannot be read, for example of one that was defined in a notebook."""


def model_digest(hosted: HostedModel) -> str:
    """Return a digest that is equal for models with the same weights, structure and code. Any thread.

    About a second per GB. The code is that of the files of all classes of modules; functions of other files
    that they call are not covered, so every use needs a trial.

    Args:
        hosted: On the CPU, with weights that do not change.

    Raises:
        UnknownCodeError: See there.
        ServiceError: A dtype that cannot be written to a file.
    """
    state = {name: value for name, value in hosted.module.state_dict().items() if isinstance(value, Tensor)}
    spec = hosted.spec
    settings = [spec.architecture, spec.source, spec.dtype, repr(spec.arguments), repr(dict(spec.options))]
    return digest_of([fingerprint(state), str(hosted.module), *settings, *_code(hosted.module)])


@cache
def environment_digest() -> str:
    """Return a digest of versions and processor: a variant is only used where an equal one was built."""
    versions = [f"{name} {_version(name)}" for name in _PACKAGES]
    machine = [platform.machine(), platform.python_version(), torch.backends.cpu.get_cpu_capability()]
    return digest_of([trocar_server.__version__, _GRAPHS, *versions, *machine, *_processor()])


def digest_of(value: object) -> str:
    """Return the sha256 of a JSON value, in hex."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _code(module: nn.Module) -> list[str]:
    """Return the classes of a module tree and digests of their files, torch's own excluded."""
    classes = {base for part in module.modules() for base in type(part).__mro__ if _is_foreign(base)}
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in classes]
    return [*sorted(names), *sorted({_file_digest(_file(kind)) for kind in classes})]


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "builtins")


def _file(kind: type) -> Path:
    try:
        return Path(inspect.getfile(kind))
    except (TypeError, OSError):
        raise UnknownCodeError(f"the code of {kind.__qualname__} is in no file") from None


def _file_digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UnknownCodeError(f"the code in {path.name} cannot be read: {error.strerror}") from None


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
