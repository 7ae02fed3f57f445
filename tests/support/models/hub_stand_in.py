"""A stand-in of the Hugging Face Hub: what `huggingface_hub` asks to download a repository at a commit.

with hub_stand_in("org/tiny", folder) as hub:
    os.environ["HF_ENDPOINT"] = hub.address          # before huggingface_hub is imported
    ... hf:org/tiny@{hub.commit}

`GET /api/models/ORG/NAME/tree/COMMIT` lists the files (older clients: `/revision/COMMIT`), `HEAD` and `GET
/ORG/NAME/resolve/COMMIT/FILE` are a file with its entity tag: of a small one the Git blob's SHA-1, of a large
one its SHA-256.
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".bin")


@dataclass
class HubStandIn:
    """A Hub of one repository."""

    name: str
    folder: Path
    address: str = ""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request, in order."""

    @property
    def commit(self) -> str:
        """The commit: a digest of all files."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path in self.files():
            digest.update(path.encode() + (self.folder / path).read_bytes())
        return digest.hexdigest()

    def files(self) -> list[str]:
        """Return the files' paths, sorted."""
        paths = (path for path in self.folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.folder).as_posix() for path in paths)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: HubStandIn, *given: object) -> None:
        self._hub = hub
        super().__init__(*given)  # type: ignore[arg-type]  # as the server calls it

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        hub, path = self._hub, unquote(urlsplit(self.path).path)
        hub.requests.append(f"{self.command} {path}")
        files = f"/{hub.name}/resolve/{hub.commit}/"
        if path == f"/api/models/{hub.name}/revision/{hub.commit}":
            listed = [{"rfilename": file} for file in hub.files()]
            found = {"_id": "1", "id": hub.name, "modelId": hub.name, "sha": hub.commit, "siblings": listed}
            self._send(json.dumps(found).encode(), {"Content-Type": "application/json"})
        elif path == f"/api/models/{hub.name}/tree/{hub.commit}":
            self._send(json.dumps([self._entry(file) for file in hub.files()]).encode(), {})
        elif path.startswith(files) and path.removeprefix(files) in hub.files():
            self._send_file(path.removeprefix(files))
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound" if "resolve" in path else "RevisionNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _send_file(self, name: str) -> None:
        data = (self._hub.folder / name).read_bytes()
        self._send(data, {"ETag": f'"{_tag(name, data)}"', "X-Repo-Commit": self._hub.commit})

    def _entry(self, name: str) -> dict[str, object]:
        data = (self._hub.folder / name).read_bytes()
        entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": _tag("", data)}
        if name.endswith(LARGE):
            entry["lfs"] = {"oid": _tag(name, data), "size": len(data), "pointerSize": 134}
        return entry

    def _send(self, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


def _tag(name: str, data: bytes) -> str:
    if name.endswith(LARGE):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


@contextmanager
def hub_stand_in(name: str, folder: Path) -> Iterator[HubStandIn]:
    """Serve a folder as a repository on a free port of 127.0.0.1; stopped with the context."""
    hub = HubStandIn(name, folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, hub))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
