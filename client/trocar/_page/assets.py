"""The page's files, read once."""

import hashlib
from dataclasses import dataclass
from importlib.resources import files

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".jpg": "image/jpeg",
}


@dataclass(frozen=True)
class Asset:
    """One file of the page."""

    content: bytes
    content_type: str
    etag: str


def read_assets() -> dict[str, Asset]:
    """Return the files by their path in the page's address."""
    result = {}
    for entry in files("trocar._page").joinpath("static").iterdir():
        suffix = "." + entry.name.rpartition(".")[2]
        if suffix in _TYPES:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            result[f"/{entry.name}"] = Asset(content, _TYPES[suffix], etag)
    result["/"] = result["/index.html"]
    return result
