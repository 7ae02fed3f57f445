"""A `trocar serve` that can write to one folder and nowhere else, as in a container with a read-only root."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

UNSHARE = shutil.which("unshare")
_SCRIPT = """
set -e
mount --bind "$1" "$1"
mount -o remount,bind,ro /
awk '{print $5}' /proc/self/mountinfo | sort -r | while read -r place; do
  case $place in
    /|/proc*|/sys*|/dev*|"$1") ;;
    *) mount -o remount,bind,ro "$place" ;;
  esac
done
cd /
shift
exec "$@"
"""


def can_seal() -> bool:
    """Tell whether this machine lets us make a mount namespace with a read-only root."""
    if UNSHARE is None:
        return False
    check = [*_unshared(Path("/tmp")), "sh", "-c", "! touch /etc/trocar-was-here 2>/dev/null"]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


@contextmanager
def sealed_server(folder: Path, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run `trocar serve` with nothing but `folder` to write to; it is killed where it still runs at the end.

    Args:
        folder: With the data directory `data`, and `tmp` for temporary files.
        words: What follows `trocar serve`.
    """
    (folder / "data").mkdir()
    (folder / "tmp").mkdir()
    environment = {
        **os.environ,
        "HOME": "/nonexistent",
        "TMPDIR": str(folder / "tmp"),
        "TROCAR_DATA_DIR": str(folder / "data"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    program = [sys.executable, "-m", "trocar", "serve", *words]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*_unshared(folder), *program], env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _unshared(folder: Path) -> list[str]:
    return [UNSHARE or "unshare", "--mount", "--map-root-user", "sh", "-c", _SCRIPT, "sh", str(folder)]
