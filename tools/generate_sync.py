"""Make the sync client from the asyncio one.

python tools/generate_sync.py            # writes client/trocar/_client*.py
python tools/generate_sync.py --check    # fails when one is stale
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import unasync

ROOT = Path(__file__).resolve().parent.parent
CLIENT = ROOT / "client" / "trocar"
FILES = {
    "_aio.py": "_client.py",
    "_aio_analyses.py": "_client_analyses.py",
    "_aio_analysis.py": "_client_analysis.py",
    "_aio_attribution.py": "_client_attribution.py",
    "_aio_passes.py": "_client_passes.py",
    "_aio_attributions.py": "_client_attributions.py",
    "_aio_connection.py": "_client_connection.py",
    "_aio_datasets.py": "_client_datasets.py",
    "_aio_edit_store.py": "_client_edit_store.py",
    "_aio_extraction.py": "_client_extraction.py",
    "_aio_fits.py": "_client_fits.py",
    "_aio_gradients.py": "_client_gradients.py",
    "_aio_health.py": "_client_health.py",
    "_aio_members.py": "_client_members.py",
    "_aio_numbering.py": "_client_numbering.py",
    "_aio_sharing.py": "_client_sharing.py",
    "_aio_stream.py": "_client_stream.py",
    "_aio_trainer.py": "_client_trainer.py",
    "_aio_trainers.py": "_client_trainers.py",
}
"""The sync module made from each asyncio one."""

DOCSTRING = '"""Part of the sync client: generated from {} by tools/generate_sync.py, do not edit."""'

NAMES = {
    "AsyncAnalyses": "Analyses",
    "AsyncAttributions": "Attributions",
    "AsyncBatches": "Batches",
    "AsyncClient": "Client",
    "AsyncConnection": "Connection",
    "AsyncDatasets": "Datasets",
    "AsyncEditStore": "EditStore",
    "AsyncExtraction": "Extraction",
    "AsyncExtractStream": "ExtractStream",
    "AsyncGenerator": "Generator",
    "AsyncGradients": "Gradients",
    "AsyncInputSet": "InputSet",
    "AsyncIterable": "Iterable",
    "AsyncIterator": "Iterator",
    "AsyncMembers": "Members",
    "AsyncNumbering": "Numbering",
    "AsyncSharing": "Sharing",
    "AsyncTrainer": "Trainer",
    "AsyncTrainerCalls": "TrainerCalls",
    "AsyncTrainers": "Trainers",
    "_AsyncBranch": "_Branch",
    "_AsyncSender": "_Sender",
    "_AsyncShared": "_Shared",
    "_aio": "_client",
    "_aio_analyses": "_client_analyses",
    "_aio_analysis": "_client_analysis",
    "_aio_attribution": "_client_attribution",
    "_aio_passes": "_client_passes",
    "_aio_attributions": "_client_attributions",
    "_aio_connection": "_client_connection",
    "_aio_datasets": "_client_datasets",
    "_aio_edit_store": "_client_edit_store",
    "_aio_extraction": "_client_extraction",
    "_aio_fits": "_client_fits",
    "_aio_gradients": "_client_gradients",
    "_aio_health": "_client_health",
    "_aio_members": "_client_members",
    "_aio_numbering": "_client_numbering",
    "_aio_sharing": "_client_sharing",
    "_aio_stream": "_client_stream",
    "_aio_trainer": "_client_trainer",
    "_aio_trainers": "_client_trainers",
    "aclose": "close",
    "anext": "next",
    "async_compute": "sync_compute",
    "async_pause": "sync_pause",
    "open_async_channel": "open_sync_channel",
    "async_stop": "sync_stop",
}
"""Names with another counterpart than unasync's own (`AsyncX` becomes `SyncX`)."""

PROSE = {
    r"\bAwaitable\[(\w+)\]": r"\1",
    r"import Awaitable, Callable": "import Callable",
    r"\bawait ": "",
    r"\basync (for|with) ": r"\1 ",
    r"trocar\.aio\.connect": "trocar.connect",
    r"trocar\._aio_stream": "trocar._client_stream",
    r"\bAsyncClient\b": "Client",
    r"\bAsyncTrainer\b": "Trainer",
    r"Generator\[(\w+), None\]": r"Generator[\1, None, None]",
    r"AsyncIterable\[Inputs\] \| |Iterable\[Inputs\] \| (?=Iterable)": "",
}
"""Patterns for docstrings, strings and types, which unasync leaves alone."""


def generate(name: str) -> str:
    """Return the sync source made from one asyncio module, formatted."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "aio", name)
        source.parent.mkdir()
        source.write_text((CLIENT / name).read_text())
        unasync.unasync_files([str(source)], [unasync.Rule("/aio/", "/sync/", NAMES)])
        text = Path(folder, "sync", name).read_text()
    text = re.sub(r'\A""".*?"""', DOCSTRING.format(name), text, flags=re.DOTALL)
    for pattern, replacement in PROSE.items():
        text = re.sub(pattern, replacement, text)
    result = CLIENT / FILES[name]
    return _ruff(
        result, "format", text=_ruff(result, "check", "--select=I,F811", "--fix", "--quiet", text=text)
    )


def _ruff(result: Path, *arguments: str, text: str) -> str:
    command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(result), "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=True, cwd=ROOT).stdout


def main() -> int:
    """Write or check, as the command line says."""
    parser = argparse.ArgumentParser(description="Make the sync client from the asyncio one.")
    parser.add_argument("--check", action="store_true", help="fail when the sync client is stale")
    is_check = parser.parse_args().check
    for name, result in FILES.items():
        path, text = CLIENT / result, generate(name)
        if not is_check:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            print(f"{path.relative_to(ROOT)} is stale; run python tools/generate_sync.py", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
