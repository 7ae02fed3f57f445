"""Lock file of the image (requirements.lock): the versions of constraints.txt and their wheels' hashes.

    .venv/bin/python -m tools.write_lock

The hashes are PyPI's, of the wheels for Debian 12 on x86-64 and on ARM. The index has them: no wheel is
downloaded.
"""

import os
import platform
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.make_environment import ROOT, report

LOCK = ROOT / "requirements.lock"
EXTRAS = ("server", "otel", "timm", "transformers", "peft")
"""What the image's build may choose from."""

PYTHON = "3.11"
_GLIBC_MINORS = range(36, 16, -1)
"""Of manylinux tags: Debian 12 has glibc 2.36."""

_HEAD = """\
# What the image is made of: versions of constraints.txt, sha256 of PyPI's wheels for x86-64 and ARM.
# Written by `make constraints`. One line per package: the Dockerfile leaves lines out for another torch.
"""

PYPI = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_INDEX_URL": "https://pypi.org/simple"}
"""No mirror, whose wheels may be others."""


def lines(pins: list[str], hashes: dict[str, set[str]]) -> str:
    """Return the lock of these pins, `name==version`.

    Raises:
        SystemExit: A package has no wheel with a hash.
    """
    missing = [pin for pin in pins if not hashes.get(pin)]
    if missing:
        raise SystemExit(f"the index has no hash of {', '.join(missing)}")
    result = [f"{pin} {' '.join(f'--hash=sha256:{h}' for h in sorted(hashes[pin]))}" for pin in sorted(pins)]
    return _HEAD + "\n".join(result) + "\n"


def main() -> None:
    """Write the file.

    Raises:
        SystemExit: This is another platform, on which pip would choose other packages.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SystemExit(
            "requirements.lock is written on x86-64 Linux, where pip chooses what the image needs"
        )
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    wanted = report("--constraint", "constraints.txt", f".[{','.join(EXTRAS)}]", *build, environment=PYPI)
    pins = [_pin(name, version) for name, version, _ in wanted if canonicalize_name(name) != "trocar"]
    hashes: dict[str, set[str]] = {pin: set() for pin in pins}
    for machine in ("x86_64", "aarch64"):
        for name, version, sha256 in report("--no-deps", *_platform(machine), *pins, environment=PYPI):
            hashes[_pin(name, version)].add(sha256)
    LOCK.write_text(lines(pins, hashes))


def _pin(name: str, version: str) -> str:
    return f"{canonicalize_name(name)}=={version}"


def _platform(machine: str) -> list[str]:
    tags = [f"manylinux_2_{minor}_{machine}" for minor in _GLIBC_MINORS] + [f"manylinux2014_{machine}"]
    platforms = [part for tag in tags for part in ("--platform", tag)]
    # pip wants a folder for files of another platform, and writes nothing there.
    return [*platforms, "--python-version", PYTHON, "--only-binary", ":all:", "--target", "build"]


def locked(path: Path = LOCK) -> dict[str, str]:
    """Return the locked versions by canonical name."""
    entries = [line.split()[0] for line in path.read_text().splitlines() if line and not line.startswith("#")]
    result = map(Requirement, entries)
    return {canonicalize_name(entry.name): str(entry.specifier).removeprefix("==") for entry in result}


if __name__ == "__main__":
    main()
