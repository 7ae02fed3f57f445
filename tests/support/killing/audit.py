"""What a data directory may hold, looked at without the server's code.

problems = torn(data_dir)                # of a server that was killed: must be none
dead = leftovers(data_dir, temporary)    # what the next server has to remove
server = processes.start(data_dir)
assert remaining(dead) == []
"""

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

_HEX32, _HEX64 = "[0-9a-f]{32}", "[0-9a-f]{64}"
_KNOWN = [
    re.compile(pattern)
    for pattern in (
        r"server\.id",
        r"(trainers|edits|datasets)/lock",
        rf"trainers/{_HEX32}/trainer\.json",
        rf"trainers/{_HEX32}/checkpoint-\d{{8,}}\.(json|safetensors)",
        rf"published/[a-z0-9._-]+/(model\.json|weights-{_HEX32}\.safetensors)",
        rf"fits/{_HEX32}\.jsonl",
        rf"edits/{_HEX64}/{_HEX64}\.edits",
        rf"datasets/pool/{_HEX64}",
        rf"datasets/owners/{_HEX64}/({_HEX32}\.dataset|shards/{_HEX64})",
        r"scratch/.*",  # goes as a whole
    )
]
"""Every file that may stay."""
Mark = tuple[int, int]
"""Of a file: it is the same one while this is the same."""


def torn(data_dir: Path) -> list[str]:
    """Return what is wrong with files that have their final names; none may ever be."""
    problems = _torn_trainers(data_dir / "trainers")
    for path in sorted((data_dir / "published").glob("*/model.json")):
        problems += _problems_of_tensors(path, (), path.parent / str(_sealed(path).get("weights_file")))
    for path in [*data_dir.glob("datasets/owners/*/*.dataset"), *data_dir.glob("edits/*/*.edits")]:
        problems += [] if _seal_holds(path) else [f"{_name(data_dir, path)}: its seal is broken"]
    for path in [*data_dir.glob("datasets/pool/*"), *data_dir.glob("datasets/owners/*/shards/*")]:
        is_whole = path.suffix or _sha256(path) == path.name
        problems += [] if is_whole else [f"{_name(data_dir, path)}: its sha256 does not match"]
    for path in data_dir.glob("datasets/owners/*/*.dataset"):
        problems += _missing_shards(path)
    return problems


def torn_on_cluster(data_dir: Path) -> list[str]:
    """Return the same of the data directory that the replicas of a cluster share."""
    problems = torn(data_dir)
    for replica in data_dir.glob("replicas/*/[0-9]*"):
        problems += torn(replica)
    for owner in data_dir.glob("replicas/*/trainers/*"):
        problems += _torn_trainers(owner)
    return problems


def leftovers(data_dir: Path, temporary: Path) -> dict[Path, Mark]:
    """Return what a killed server has left that belongs to nobody, in its two folders."""
    found = {path for path in _files(data_dir) if not _is_known(data_dir, path)}
    for folder in _folders(data_dir / "trainers"):
        has_record = (folder / "trainer.json").exists()
        found |= {
            path for path in folder.glob("checkpoint-*.safetensors") if not path.with_suffix(".json").exists()
        }
        found |= set() if has_record or list(folder.glob("checkpoint-*.json")) else {folder}
    for folder in _folders(data_dir / "published"):
        record = folder / "model.json"
        named = str(_sealed(record).get("weights_file")) if record.exists() else ""
        found |= {path for path in folder.glob("weights-*") if path.name != named}
        found |= {folder} if not named else set()
    ids = {folder.name for folder in _folders(data_dir / "trainers")}
    found |= {path for path in data_dir.glob("fits/*.jsonl") if path.stem not in ids}
    for owner in _folders(data_dir / "datasets" / "owners"):
        named_shards = {shard for path in owner.glob("*.dataset") for shard in _shards_of(path)}
        found |= {path for path in owner.glob("shards/*") if path.name not in named_shards}
    found |= {path for path in data_dir.glob("datasets/pool/*") if path.stat().st_nlink == 1}
    found |= {*data_dir.glob("scratch/*"), *temporary.glob("*")}
    return {path: _mark(path) for path in found}


def remaining(dead: dict[Path, Mark]) -> list[Path]:
    """Return which leftovers are still there."""
    return sorted(path for path, mark in dead.items() if _mark_or_none(path) == mark)


def _torn_trainers(folder: Path) -> list[str]:
    problems = []
    for path in sorted(folder.glob("*/checkpoint-*.json")):
        problems += _problems_of_tensors(path, ("checkpoint",), path.with_suffix(".safetensors"))
    for path in sorted(folder.glob("*/trainer.json")):
        problems += [] if _seal_holds(path) else [f"{_name(folder, path)}: its seal is broken"]
    return problems


def _problems_of_tensors(manifest: Path, inside: tuple[str, ...], data: Path) -> list[str]:
    facts = _sealed(manifest)
    for key in inside:
        facts = facts.get(key, {})
    if not facts:
        return [f"{manifest}: its seal is broken"]
    if not data.is_file():
        return [f"{manifest}: its tensor file is missing"]
    if (data.stat().st_size, _sha256(data)) != (facts["byte_count"], facts["sha256"]):
        return [f"{manifest}: its tensors have another sha256"]
    with safe_open(data, "np") as tensors:
        return [] if list(tensors.keys()) else [f"{data}: it holds no tensor"]


def _missing_shards(record: Path) -> list[str]:
    shards = record.parent / "shards"
    missing = [shard for shard in _shards_of(record) if not (shards / shard).exists()]
    is_complete = _sealed(record).get("form") is not None
    return [f"{record}: {len(missing)} shards are gone"] if missing and is_complete else []


def _shards_of(record: Path) -> list[str]:
    return [str(shard["sha256"]) for shard in _sealed(record).get("manifest", {}).get("shards", [])]


def _sealed(path: Path) -> dict[str, Any]:
    """Return what a record says; nothing where its seal is broken."""
    return _body(path) if _seal_holds(path) else {}


def _seal_holds(path: Path) -> bool:
    head, _, body = path.read_bytes().partition(b"\n")
    return head.rsplit(b" ", 1)[-1] == hashlib.sha256(body).hexdigest().encode()


def _body(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(path.read_bytes().partition(b"\n")[2])
    return body


def _is_known(data_dir: Path, path: Path) -> bool:
    return any(pattern.fullmatch(_name(data_dir, path)) for pattern in _KNOWN)


def _name(data_dir: Path, path: Path) -> str:
    return path.relative_to(data_dir).as_posix()


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if not path.is_dir())


def _folders(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.is_dir()]


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _mark(path: Path) -> Mark:
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def _mark_or_none(path: Path) -> Mark | None:
    try:
        return _mark(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
