"""Hub cache: repositories of the Hugging Face Hub, downloaded once and verified before every load.

CACHE_DIR/hub/org--name@commit/                     the files
CACHE_DIR/hub/org--name@commit/.trocar-sha256       the digest of each, written when all are there
CACHE_DIR/hub/.partial-*/                           only while a download runs; see `clean_downloads`
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.models.source import Source
from trocar_server.storage.durable import write_durably

ALLOWED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
"""Files that are downloaded: no pickles, no code."""
_MANIFEST = ".trocar-sha256"
_DOWNLOADER_FILES = ".cache"


def repository_folder(source: Source, cache_dir: Path) -> Path:
    """Return the folder of a pinned repository, downloaded and verified.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, it cannot be downloaded; `WEIGHTS_CORRUPT`, a file is not what
            was downloaded.
    """
    folder = cached_folder(source, cache_dir)
    if not (folder / _MANIFEST).is_file():
        download(source, cache_dir)
    verify(folder)
    return folder


def cached_folder(source: Source, cache_dir: Path) -> Path:
    """Return where a repository is kept."""
    return cache_dir / "hub" / f"{source.name.replace('/', '--')}@{source.revision}"


def download(source: Source, cache_dir: Path) -> None:
    """Download a repository, unless it is there. Needs no torch.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, with what to do instead.
    """
    folder = cached_folder(source, cache_dir)
    if (folder / _MANIFEST).is_file():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=folder.parent) as partial:
            files = _fetch(source, Path(partial) / "files")
            manifest = _manifest(files).encode()
            write_durably(files / _MANIFEST, manifest, is_private=False, is_durable=False)
            _put(files, folder)
    except Exception as error:  # the client of the Hub raises many kinds
        raise ServiceError(
            ErrorReason.WEIGHTS_UNAVAILABLE,
            f"cannot download {source.public_name} ({type(error).__name__}: {first_line(error)}). Without "
            f"network: `hf download {source.name} --revision {source.revision} --local-dir FOLDER` "
            "elsewhere, then `trocar serve hf:./FOLDER`",
        ) from error


def verify(folder: Path) -> None:
    """Compare every file with its digest.

    Raises:
        ServiceError: `WEIGHTS_CORRUPT`, a file differs, is missing, or was added.
    """
    expected = (folder / _MANIFEST).read_text(encoding="utf-8")
    actual = _manifest(folder)
    if actual != expected:
        changed = sorted(
            {line.split("  ", 1)[1] for line in {*expected.splitlines()} ^ {*actual.splitlines()}}
        )
        raise ServiceError(
            ErrorReason.WEIGHTS_CORRUPT,
            f"files of '{folder.name}' are not those that were downloaded: {', '.join(changed[:5])}; "
            "remove the folder from the cache, and it is downloaded again",
        )


def _put(files: Path, folder: Path) -> None:
    """Rename a finished folder. One that another server finished meanwhile stays: it may load from it."""
    with contextlib.suppress(OSError):  # there is a folder
        files.replace(folder)
        return
    if not (folder / _MANIFEST).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        files.replace(folder)


def _fetch(source: Source, target: Path) -> Path:
    from huggingface_hub import snapshot_download

    snapshot_download(source.name, revision=source.revision, allow_patterns=list(ALLOWED), local_dir=target)
    shutil.rmtree(target / _DOWNLOADER_FILES, ignore_errors=True)
    return target


def _manifest(folder: Path) -> str:
    files = sorted(
        Path(root, name).relative_to(folder)
        for root, _, names in os.walk(folder)
        for name in names
        if name != _MANIFEST
    )
    return "".join(f"{_sha256(folder / file)}  {file.as_posix()}\n" for file in files)


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
