"""Make the sync client from the asyncio one.

python tools/generate_sync.py            # writes client/trocar/_client.py
python tools/generate_sync.py --check    # fails when it is stale
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "client" / "trocar" / "_aio.py"
RESULT = ROOT / "client" / "trocar" / "_client.py"

DOCSTRING = '"""The sync client: generated from _aio.py by tools/generate_sync.py, do not edit."""'

NAMES = {
    "AsyncClient": "Client",
    "open_async_channel": "open_sync_channel",
    "async_stop": "sync_stop",
}
"""Names with another counterpart than unasync's own (`AsyncX` becomes `SyncX`)."""

PROSE = {
    r'\A""".*?"""': DOCSTRING,
    r"\bawait ": "",
    r"\basync (for|with) ": r"\1 ",
    r"trocar\.aio\.connect": "trocar.connect",
    r"\bAsyncClient\b": "Client",
}
"""Patterns for docstrings and strings, which unasync leaves alone."""


def generate() -> str:
    """Return the source of the sync client, formatted."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "aio", SOURCE.name)
        source.parent.mkdir()
        source.write_text(SOURCE.read_text())
        unasync.unasync_files([str(source)], [unasync.Rule("/aio/", "/sync/", NAMES)])
        text = Path(folder, "sync", SOURCE.name).read_text()
    for pattern, replacement in PROSE.items():
        text = re.sub(pattern, replacement, text, flags=re.DOTALL)
    return _ruff("format", "-", text=_ruff("check", "--select=I", "--fix", "--quiet", "-", text=text))


def _ruff(*arguments: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(RESULT)]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=True, cwd=ROOT).stdout


def main() -> int:
    """Write or check, as the command line says."""
    parser = argparse.ArgumentParser(description="Make the sync client from the asyncio one.")
    parser.add_argument("--check", action="store_true", help="fail when the sync client is stale")
    is_check = parser.parse_args().check
    text = generate()
    if not is_check:
        RESULT.write_text(text)
    elif not RESULT.exists() or RESULT.read_text() != text:
        print(f"{RESULT.relative_to(ROOT)} is stale; run python tools/generate_sync.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
