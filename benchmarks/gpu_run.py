"""Everything that needs a GPU, in one run of under 30 minutes: tests, tables, profiles. `make gpu`.

    python -m benchmarks.gpu_run FOLDER

Each part is a process with a limit of its own and writes into FOLDER as it goes, so that a part that fails or
hangs costs the others nothing. `summary.json` has their exit statuses and seconds, and the machine.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import machine

_ROOT = Path(__file__).parents[1]
TIMED_OUT = 124
"""The status of a part that ran past its limit, as of the command `timeout`."""


@dataclass(frozen=True)
class Part:
    """One process of the run."""

    command: Sequence[str]
    limit_s: float


def parts(folder: Path) -> dict[str, Part]:
    """Return the parts by name, in their order: their limits are 28 minutes together."""
    python = sys.executable
    tests = (python, "-m", "pytest", "-m", "cuda", "-n", "0", "-v", *files_of_tests())
    results = str(folder / "results.json")
    return {
        "tests": Part(tests, 8 * 60),
        "profiles": Part((python, "-m", "benchmarks.gpu_profile", str(folder / "profiles")), 5 * 60),
        "tables": Part((python, "-m", "benchmarks", "gpu", "--json", results), 15 * 60),
    }


def files_of_tests() -> list[str]:
    """Return the files that have a test marked `cuda`: to collect all others takes a minute."""
    files = sorted((_ROOT / "tests").rglob("test_*.py"))
    marked = [file for file in files if "pytest.mark.cuda" in file.read_text(encoding="utf-8")]
    return [str(file.relative_to(_ROOT)) for file in marked]


def run(folder: Path, wanted: Mapping[str, Part]) -> dict[str, dict[str, float]]:
    """Run the parts one after the other; return and write the exit status and the seconds of each."""
    folder.mkdir(parents=True, exist_ok=True)
    result: dict[str, dict[str, float]] = {}
    for name, part in wanted.items():
        print(f"{name}: at most {part.limit_s / 60:.0f} min", flush=True)
        started = time.monotonic()
        with (folder / f"{name}.txt").open("w", encoding="utf-8") as output:
            try:
                ended = subprocess.run(
                    part.command,
                    cwd=_ROOT,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=part.limit_s,
                    check=False,
                )
                status = ended.returncode
            except subprocess.TimeoutExpired:
                status = TIMED_OUT
        result[name] = {"status": status, "seconds": round(time.monotonic() - started, 1)}
        summary = {"machine": machine.describe(), "parts": result}
        (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: status {status} after {result[name]['seconds']:.0f} s", flush=True)
    return result


def main(folder: Path) -> int:
    """Run all parts; return 1 if one failed, 2 without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("torch finds no CUDA device here", file=sys.stderr)
        return 2
    result = run(folder, parts(folder))
    return int(any(part["status"] for part in result.values()))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
