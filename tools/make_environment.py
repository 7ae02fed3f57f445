"""An environment at one end of the dependency ranges of pyproject.toml: the newest versions, or the floors.

    .venv/bin/python -m tools.make_environment newest    # makes .venv-newest
    .venv/bin/python -m tools.make_environment floors    # makes .venv-floors

Users install without constraints.txt, so pip gives them the newest of everything, and users with older
packages keep them down to the floors. An environment that is up to date stays as it is.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = (
    *("server", "openvino", "otel", "datasets", "gguf", "huggingface", "pandas", "tensorboard"),
    *("notebook", "page", "ray", "timm", "peft", "transformers", "test"),
)
"""What is installed: all that users may want and that the chosen tests need."""

PINS = "pins.json"
"""In an environment that is complete: its versions."""

_BUNDLED = frozenset({"pip", "setuptools"})
"""What a new environment has already, of any version, before the main one is looked at."""

Pins = dict[str, str]
"""Versions by canonical name."""


def requirements(project: Mapping[str, Any], extras: tuple[str, ...] = EXTRAS) -> Iterator[Requirement]:
    """Yield the requirements of a project and some of its extras, with the extras that these name."""
    groups = [project["dependencies"], *(project["optional-dependencies"][extra] for extra in extras)]
    for requirement in (Requirement(text) for group in groups for text in group):
        if requirement.name != project["name"]:
            yield requirement
        else:
            own = {**project, "dependencies": []}
            yield from requirements(own, tuple(requirement.extras))


def floors(project: Mapping[str, Any], extras: tuple[str, ...] = EXTRAS) -> Pins:
    """Return the lowest version of each requirement that the project allows.

    Raises:
        ValueError: A requirement has no floor.
    """
    result: Pins = {}
    for requirement in requirements(project, extras):
        lowest = [part.version for part in requirement.specifier if part.operator in {">=", "==", "~="}]
        if len(lowest) != 1:
            raise ValueError(f"{requirement} has no floor; give it one: {requirement.name}>=...")
        result[canonicalize_name(requirement.name)] = lowest[0]
    return result


def shared(pins: Pins, installed: Pins) -> set[str]:
    """Return the packages to take from the main environment: all of one version, if torch is one of them.

    torch and the libraries that it loads stay together, in one place or the other.
    """
    if installed.get("torch") != pins["torch"]:
        return set()
    same = {name for name, version in pins.items() if installed.get(name) == version}
    return same - _BUNDLED


def resolve(constraints: Pins) -> Pins:
    """Return the versions that pip chooses in an empty environment; downloads next to nothing."""
    with tempfile.TemporaryDirectory() as folder:
        limits = Path(folder, "constraints.txt")
        limits.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        result = report("--constraint", limits, f".[{','.join(EXTRAS)}]")
    pins: Pins = {canonicalize_name(name): version for name, version, _ in result}
    del pins["trocar"]
    return pins


def report(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """Return name, version and sha256 of each file that pip would install into an empty environment."""
    with tempfile.NamedTemporaryFile() as file:
        options = ("--dry-run", "--ignore-installed", "--report", file.name)
        _pip(sys.executable, *options, *arguments, environment=environment or {})
        entries = json.load(file)["install"]
    return [(entry["metadata"]["name"], entry["metadata"]["version"], _sha256(entry)) for entry in entries]


def _sha256(entry: Mapping[str, Any]) -> str:
    result: str = entry["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
    return result


def make(folder: Path, pins: Pins) -> None:
    """Make an environment of exactly these versions, and of the sources here.

    Raises:
        SystemExit: pip failed, or something else got installed.
    """
    here: Pins = {canonicalize_name(result.name): result.version for result in metadata.distributions()}
    taken = shared(pins, here)
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    wanted = [f"{name}=={version}" for name, version in pins.items() if name not in taken]
    _pip(python, "--no-deps", *wanted)
    _pip(python, "--no-deps", "--editable", ".")
    if taken:
        # Searched after the environment's own packages; .pth files found there are not read.
        pure = subprocess.check_output([python, "-c", _SITE], text=True).strip()
        Path(pure, "main.pth").write_text(sysconfig.get_path("purelib") + "\n")
    result = json.loads(subprocess.check_output([python, "-c", _VERSIONS, json.dumps(pins)], text=True))
    if result != pins:
        raise SystemExit(f"{folder.name}: differs from what pip chose: {dict(result.items() ^ pins.items())}")
    (folder / PINS).write_text(json.dumps(pins))


_SITE = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSIONS = (
    "import json, sys; from importlib.metadata import version; "
    "print(json.dumps({name: version(name) for name in json.loads(sys.argv[1])}))"
)


def _pip(python: str | Path, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> None:
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", "-qq", *arguments]
    variables = {**os.environ, "PYTHONPATH": "", **(environment or {})}
    ended = subprocess.run(command, cwd=ROOT, env=variables, check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)


def main(end: str) -> None:
    """Bring the environment of one end up to date."""
    folder = ROOT / f".venv-{end}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = resolve(floors(project) if end == "floors" else {})
    made = folder / PINS
    if not made.exists() or json.loads(made.read_text()) != pins:
        print(f"{end}: installing {len(pins)} packages into {folder.name}", flush=True)
        make(folder, pins)
    direct = sorted({canonicalize_name(requirement.name) for requirement in requirements(project)})
    print(f"{end}:", ", ".join(f"{name} {pins[name]}" for name in direct if name in pins))


if __name__ == "__main__":
    if sys.argv[1:] not in (["newest"], ["floors"]):
        sys.exit(__doc__)
    main(sys.argv[1])
