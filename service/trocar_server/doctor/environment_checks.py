"""Environment checks: Python, installed packages and their compatibility."""

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import InvalidRequirement, Requirement

from trocar_server.config import ServerConfig
from trocar_server.doctor.finding import Finding, fail, ok

_LEAST_PYTHON = (3, 11)
_DISTRIBUTION = "trocar"
_EXTRA = {"extra": "server"}
_REINSTALL = 'pip install --upgrade "trocar[server]"'


def check_python(config: ServerConfig) -> Iterator[Finding]:
    """Check the version of Python."""
    text = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    if sys.version_info >= _LEAST_PYTHON:
        yield ok("python", text)
    else:
        yield fail("python", text, "use Python 3.11 or newer")


def check_packages(config: ServerConfig) -> Iterator[Finding]:
    """Check that what the server needs is installed, in versions that it was made for."""
    for requirement in _requirements():
        name = requirement.name
        try:
            result = version(name)
        except PackageNotFoundError:
            yield fail(name, "not installed", f"{_REINSTALL}")
            continue
        if requirement.specifier.contains(result, prereleases=True):
            yield ok(name, result)
        else:
            yield fail(
                name, f"version {result} is installed, {requirement.specifier} is required", _REINSTALL
            )


def check_torch(config: ServerConfig) -> Iterator[Finding]:
    """Check that torch and torchvision are a pair: torchvision's operators are for one build of torch."""
    try:
        torchvision = importlib.import_module("torchvision")
        torch = importlib.import_module("torch")
        torch.ops.torchvision.nms  # noqa: B018 - it is looked up, and fails where the pair does not fit
    except Exception as error:  # noqa: BLE001 - ImportError, OSError, RuntimeError of an operator
        line = (str(error).splitlines() or [type(error).__name__])[0][:200]
        yield fail(
            "torch pair",
            f"torch {_version('torch')} and torchvision {_version('torchvision')} do not match: {line}",
            "install both from the same index, for example pip install torch torchvision --index-url "
            "https://download.pytorch.org/whl/cpu",
        )
        return
    yield ok("torch pair", f"torch {torch.__version__} with torchvision {torchvision.__version__}")


def _requirements() -> Iterator[Requirement]:
    for text in requires(_DISTRIBUTION) or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate(_EXTRA):
            yield requirement


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(none)"
