"""A bulk extraction with Ray as a process of its own, which tests kill and start again.

writer = Writer(cluster_address, server_address, source, out)
writer.wait_for_batches(3)
os.kill(writer.process_id, SIGKILL)
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TAPS = ["conv", "fc"]
CHOICES: dict[str, Any] = {"batch": 4, "shard_size": 24, "numerics": "exact"}
WORKERS = 2
_READER = b"ray::Reader"


class Writer:
    """The process that runs `trocar.ray.extract_dataset`; its lines tell each batch that it has written."""

    def __init__(self, cluster: str, server: str, source: Path, out: Path) -> None:
        settings = json.dumps([cluster, server, str(source), str(out)])
        code = f"from {__name__} import main; main()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code, settings], env=environment, stdout=subprocess.PIPE, text=True
        )

    @property
    def process_id(self) -> int:
        return self._process.pid

    def wait_for_batches(self, count: int) -> bool:
        """Wait for so many more batches; False if the process ended before."""
        assert self._process.stdout is not None
        return all(self._process.stdout.readline() for _ in range(count))

    def end(self) -> int:
        """Wait for its end; returns its status."""
        self._process.communicate()
        return self._process.returncode


def readers_of(raylets: list[int]) -> list[int]:
    """Return the process ids of the actors that read samples, on the nodes of these raylets alone."""
    return [process_id for process_id, parent in _processes() if parent in raylets and _is_reader(process_id)]


def _processes() -> Iterator[tuple[int, int]]:
    """Yield every process and its parent."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                yield int(folder.name), int(fields[1])


def _is_reader(process_id: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/cmdline").read_bytes().startswith(_READER)
    return False


def main() -> None:
    """Extract; the argument has the settings."""
    import trocar
    import trocar.ray

    cluster, server, source, out = json.loads(sys.argv[1])
    with trocar.ray.session(cluster), trocar.connect(server) as client:

        def tell(progress: trocar.Progress) -> None:
            print(progress.sample_count, flush=True)

        trocar.ray.extract_dataset(
            client, "plain", source, TAPS, out, workers=WORKERS, progress=tell, **CHOICES
        )
