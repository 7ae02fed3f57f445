"""Complete files have one writer at each end: `trocar._base.replacement` and `trocar_server.storage.durable`.

A second one would forget the mode of the file that it replaces, or that a power cut may come.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("client/trocar", "service/trocar_server")
WRITERS = ("client/trocar/_base/replacement.py", "service/trocar_server/storage/durable.py")

NAMED = {"rename", "renames", "link", "hardlink_to", "symlink", "symlink_to"}
"""Calls that give a file or folder another name."""
CREATED = {"write_text", "write_bytes", "touch", "NamedTemporaryFile", "mkstemp", "create_locked", "tofile"}
"""Calls that make a file, or fill one."""
LIBRARIES = {
    *("save_file", "save_model", "savefig", "ParquetWriter"),
    *("download_url_to_file", "snapshot_download", "hf_hub_download"),
}
"""Calls of libraries that write a file themselves."""
SAVES = {"torch", "np", "numpy"}
"""Libraries whose `save` writes a file."""
CONTEXTS = {"replacement", "folder_replacement"}
"""What is written inside these gets its name from the writer."""
INSIDE = {*LIBRARIES, "open_group"}
"""Calls that may be inside."""

OTHERS: dict[str, tuple[set[str], str]] = {
    # Renames of what was written before.
    "service/trocar_server/app/state_folder.py": ({"rename"}, "moves of earlier versions' folders"),
    "service/trocar_server/engine/compiled/variant_store.py": ({"rename"}, "a folder gets its name"),
    "service/trocar_server/training/files/owner_folders.py": ({"rename"}, "a trainer is taken over"),
    "service/trocar_server/training/files/published.py": ({"rename"}, "a model's folder is taken over"),
    "service/trocar_server/training/files/trainer_store.py": ({"rename"}, "a trainer's folder is deleted"),
    # Folders that are named when a library has filled them.
    "service/trocar_server/engine/compiled/backends/conversion.py": (
        {"save_model"},
        "OpenVINO, into a temporary folder, which `VariantStore.keep` syncs and names",
    ),
    "service/trocar_server/models/huggingface/hub.py": (
        {"snapshot_download", "replace"},
        "the Hub's client, into a temporary folder, which is named and verified before every load",
    ),
    "service/trocar_server/models/timm_models.py": (
        {"hf_hub_download"},
        "the Hub's client, into a folder of its own; `move_durably` names the file",
    ),
    "service/trocar_server/models/weights/downloads.py": (
        {"download_url_to_file"},
        "torch, into the folder of downloads; its digest is checked, and it is converted before use",
    ),
    # Files that are changed in place for as long as they exist.
    "client/trocar/_export/open_shard.py": ({"touch", "FileIO"}, "a journal, and rows, that are appended"),
    "service/trocar_server/spool/files/chunks.py": ({"O_CREAT", "rename"}, "blocks that come and go"),
    "service/trocar_server/spool/files/directory.py": ({"O_CREAT"}, "the lock of a spool"),
    "service/trocar_server/shared_memory/folder.py": ({"create_locked"}, "shared memory"),
    "service/trocar_server/directions/pooled_values.py": ({"mkstemp"}, "a file without a name"),
    "service/trocar_server/storage/janitor.py": ({"O_CREAT"}, "makes the writer's partial files"),
    "service/trocar_server/storage/data_lock.py": ({"O_CREAT"}, "a lock"),
    "service/trocar_server/storage/folder_lease.py": ({"O_CREAT"}, "a lock, with its holder"),
    "service/trocar_server/storage/shared_lock.py": ({"O_CREAT"}, "a lock"),
    "service/trocar_server/auth/token_file.py": ({"O_CREAT"}, "a lock"),
    # No files.
    "client/trocar/_base/figures.py": ({"savefig"}, "into memory"),
    "client/trocar/_attribution/attribution.py": ({"savefig"}, "into memory"),
    "client/trocar/_bench/process.py": ({"fdopen"}, "a pipe"),
    "client/trocar/_cli/demo/hosting.py": ({"open"}, "a log, to which a process appends"),
    "service/trocar_server/cluster/lines.py": ({"fdopen"}, "standard output"),
    "service/trocar_server/training/fit/ranks/local_ranks.py": ({"save"}, "into memory"),
    "service/trocar_server/app/lifecycle.py": ({"replace"}, "an authorizer is replaced"),
    "service/trocar_server/rpc/call/authorization.py": ({"replace"}, "an authorizer is replaced"),
}
"""Other places, the names of their calls, and why they are no writers of complete files."""


def writes_of(node: ast.AST, *, is_inside: bool = False) -> Iterator[str]:
    """Yield the names of calls and flags that could give a file its content or its name.

    Args:
        node: Of the program.
        is_inside: Whether it is in a context whose result the writer names.
    """
    if isinstance(node, ast.With):
        is_inside = is_inside or any(_name(item.context_expr) in CONTEXTS for item in node.items)
    if isinstance(node, ast.Attribute) and node.attr in ("O_CREAT", "O_TRUNC"):
        yield node.attr
    if isinstance(node, ast.Call) and not (is_inside and _name(node) in INSIDE) and _writes(node):
        yield _name(node)
    for child in ast.iter_child_nodes(node):
        yield from writes_of(child, is_inside=is_inside)


def _name(call: ast.AST) -> str:
    called = call.func if isinstance(call, ast.Call) else None
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def _writes(call: ast.Call) -> bool:
    name = _name(call)
    owner = getattr(call.func.value, "id", "?") if isinstance(call.func, ast.Attribute) else ""
    if name in NAMED | CREATED | LIBRARIES:
        return True
    if name == "replace":
        return owner == "os" or (bool(owner) and len(call.args) == 1 and not call.keywords)
    if name in ("copy", "copy2", "copyfile", "copytree", "move"):
        return owner == "shutil"
    if name.startswith("save"):
        return owner in SAVES
    if name in ("open", "fdopen", "FileIO", "open_group"):
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
        modes = [str(one.value) for one in given if isinstance(one, ast.Constant)]
        return any(re.fullmatch(r"[rwxabt+-]{1,3}", mode) and set(mode) & set("wx+") for mode in modes)
    return False


def test_no_file_has_a_second_writer() -> None:
    seen: dict[str, set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            names = set(writes_of(ast.parse(path.read_text(encoding="utf-8"))))
            if names:
                seen[path.relative_to(ROOT).as_posix()] = names
    assert {path for path in WRITERS if not seen.pop(path)} == set()
    assert seen == {path: names for path, (names, _) in OTHERS.items()}


@pytest.mark.parametrize(
    ("program", "names"),
    [
        ("os.replace(a, b); path.replace(b); folder(x).replace(b)", ["replace"] * 3),
        ("'a'.replace('b', 'c'); replace(a, b=1); copy.replace(a, b=1)", []),
        ("os.rename(a, b); path.rename(b); os.link(a, b)", ["rename", "rename", "link"]),
        ("path.write_text(x); path.write_bytes(x)", ["write_text", "write_bytes"]),
        ("open(p, 'w'); p.open('xb'); open(p, mode='r+'); FileIO(p, 'r+')", ["open"] * 3 + ["FileIO"]),
        ("open(p); p.open('rb'); open(p, 'a'); p.open(encoding='utf-8'); open(p, 'rb')", []),
        ("os.fdopen(d, 'w'); os.open(p, os.O_RDWR | os.O_CREAT)", ["fdopen", "O_CREAT"]),
        ("os.open(p, os.O_RDONLY)", []),
        ("shutil.copy(a, b); value.copy(); shutil.move(a, b)", ["copy", "move"]),
        ("open_group(p, mode='r'); open_group(p, mode='w-')", ["open_group"]),
        ("torch.save(a, b); np.savez(p); trainer.save(p)", ["save", "savez"]),
        ("save_file(a, p); figure.savefig(p)", ["save_file", "savefig"]),
        ("with replacement(p) as q: save_file(a, q); q.write_text(x)", ["write_text"]),
        ("with folder_replacement(p) as q, x: open_group(q, mode='w')", []),
        ("with tempfile.NamedTemporaryFile() as f: f.write(x)", ["NamedTemporaryFile"]),
    ],
)
def test_writers_are_seen(program: str, names: list[str]) -> None:
    assert list(writes_of(ast.parse(program))) == names
