"""Complete files have one writer at each end: `trocar._base.replacement` and `trocar_server.storage.durable`.

A second one would forget the mode of the file that it replaces, or that a power cut may come.
"""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITES = {"write_text", "write_bytes", "rename", "NamedTemporaryFile", "mkstemp"}
OTHERS = {
    "client/trocar/_base/replacement.py": "the writer",
    "service/trocar_server/storage/durable.py": "the writer",
    # Files of folders that these programs have made for themselves, or that get their name as a whole.
    "client/trocar/_cli/demo/command.py": "the demo's configuration, in its own folder",
    "client/trocar/_cli/demo/text.py": "the demo's configuration, in its own folder",
    "client/trocar/_cli/demo/training.py": "the demo's configuration, in its own folder",
    "client/trocar/_export/writers/numpy_writer.py": "in a folder that `disk.publish` names",
    "service/trocar_server/models/huggingface/hub.py": "in a folder that gets its name when it is complete",
    # Renames of what was written before: folders, and whole files on their way to another folder.
    "service/trocar_server/app/state_folder.py": "moves of earlier versions' folders",
    "service/trocar_server/engine/compiled/variant_store.py": "a folder gets its name",
    "service/trocar_server/spool/files/chunks.py": "a chunk is hidden and shown",
    "service/trocar_server/training/files/owner_folders.py": "a trainer's folder is taken over",
    "service/trocar_server/training/files/published.py": "a model's folder is taken over",
    "service/trocar_server/training/files/trainer_store.py": "a deleted trainer's folder",
    "service/trocar_server/training/datasets/incoming.py": "a shard that was received gets its place",
    # No files.
    "service/trocar_server/app/lifecycle.py": "an authorizer is replaced",
    "service/trocar_server/rpc/call/authorization.py": "an authorizer is replaced",
}


def writes_of(tree: ast.AST) -> Iterator[str]:
    """Yield the calls that could give a file its content or its name."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        is_of_os = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "os"
        is_path = isinstance(node.func, ast.Attribute) and len(node.args) == 1 and not node.keywords
        if name in WRITES or (name == "replace" and (is_of_os or is_path)):
            yield name


def test_no_file_has_a_second_writer() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for package in ("client/trocar", "service/trocar_server"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for name in writes_of(ast.parse(path.read_text(encoding="utf-8"))):
                found[path.relative_to(ROOT).as_posix()].append(name)
    assert {path: names for path, names in found.items() if path not in OTHERS} == {}
    assert OTHERS.keys() - found.keys() == set()


def test_writers_are_seen() -> None:
    program = "os.replace(a, b); path.replace(b); p.write_text(x); 'a'.replace('b', 'c'); replace(a, b=1)"
    assert list(writes_of(ast.parse(program))) == ["replace", "replace", "write_text"]
