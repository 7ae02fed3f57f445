"""Peer environments: a virtual environment each, created on first use; torch is the project's own.

The peer's pins go into its environment. Its other dependencies are found in the project's, behind its
own, through a `.pth` file: torch is not installed twice, and a constraint keeps pip from trying.
"""

import hashlib
import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import trocar
import trocar_api

_REQUIREMENTS = Path(__file__).parent / "requirements"
_SHARED = ("torch", "torchvision", "numpy", "grpcio", "protobuf")
"""Packages that every peer must take as they are, so that all are measured with the same."""
_INSTALL_LIMIT_S = 900
_MOST_REASON = 300


class PeerMissingError(Exception):
    """A peer cannot be installed here; the message says why."""


def python_of(peer: str) -> str:
    """Return the interpreter of a peer's environment, which is created if it is missing.

    Raises:
        PeerMissingError: pip cannot install it.
    """
    requirements = _REQUIREMENTS / f"{peer}.txt"
    pins = "".join(f"{name}=={version(name)}\n" for name in _SHARED)
    key = hashlib.sha256(f"{requirements.read_text()}{pins}{sys.version}{sys.prefix}".encode()).hexdigest()[
        :12
    ]
    folder = cache_folder() / f"{peer}-{key}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        _make(folder, python, requirements, pins)
    return str(python)


def cache_folder() -> Path:
    """Return the folder of the environments: `TROCAR_BENCH_CACHE`, or one in the user's cache."""
    named = os.environ.get("TROCAR_BENCH_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "trocar-bench"


def peer_environment() -> dict[str, str]:
    """Return the environment variables that let a peer's process find this code and nothing else of ours."""
    roots = [Path(__file__).parents[3], *(Path(str(p.__file__)).parents[1] for p in (trocar, trocar_api))]
    return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(str(root) for root in roots))}


def _make(folder: Path, python: Path, requirements: Path, pins: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(pins)
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        constraints.write_text(pins)  # --clear has removed it
        own = Path(sysconfig.get_path("purelib"))
        site = python.parents[1] / "lib" / own.parent.name / own.name
        (site / "project.pth").write_text(f"{own}\n")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, "--constraint", str(constraints), "--requirement", str(requirements)])
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        lines = [line for line in said.decode(errors="replace").splitlines() if line.startswith("ERROR")]
        raise PeerMissingError(" ".join(lines)[:_MOST_REASON] or str(error)[:_MOST_REASON]) from error
    (folder / "complete").touch()


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=_INSTALL_LIMIT_S)
