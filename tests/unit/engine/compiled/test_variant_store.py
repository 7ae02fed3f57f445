"""Variants on disk: kept whole or not at all, and removed when anything differs."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
import torch
from structlog.testing import capture_logs

from tests.unit.engine.compiled.backends.nets import into, out, recipe
from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.compiled.variant_record import VariantRecord
from trocar_server.engine.compiled.variant_store import VariantStore
from trocar_server.engine.request.numerics import Numerics
from trocar_server.storage.durable import DamagedError
from trocar_server.surgery import Target

FILES = {"graph.xml": b"<net/>", "graph.bin": bytes(range(256)) * 8}
IDENTITY = ("a" * 64, "b" * 64)

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.engine.compiled.test_variant_store import build, record_of, store_in
from trocar_server.storage import sealed_record
store = store_in(Path(sys.argv[1]))
folder = build(store)
if sys.argv[2] == "before the record":
    os.kill(os.getpid(), signal.SIGKILL)
Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
store.keep(folder, record_of("conv"))
"""


def record_of(path: str, identity: tuple[str, str] = IDENTITY) -> VariantRecord:
    used = ("openvino", Numerics.BF16)
    built = Built((("conv", "norm"),), has_graph=True)
    return VariantRecord.of(identity, recipe(out(path)), Numerics.BF16, used, built)


def store_in(root: Path, max_bytes: int = 1 << 20) -> VariantStore:
    return VariantStore(root, max_bytes, structlog.get_logger("test"))


def build(store: VariantStore, files: dict[str, bytes] = FILES) -> "object":
    folder = store.new_folder()
    for name, content in files.items():
        (folder.path / name).write_bytes(content)
    return folder


def kept(store: VariantStore, path: str = "conv", identity: tuple[str, str] = IDENTITY) -> str:
    key = store.keep(build(store), record_of(path, identity))  # type: ignore[arg-type]
    assert key is not None
    return key


def test_what_is_kept_is_found_by_another_store(tmp_path: Path) -> None:
    key = kept(store_in(tmp_path / "new" / "compiled"))
    (found,) = store_in(tmp_path / "new" / "compiled").find(*IDENTITY)
    store_in(tmp_path).check(found)
    assert found.folder.name == key
    assert found.record.model_copy(update={"files": {}}) == record_of("conv")
    assert {
        path.name: path.read_bytes() for path in found.folder.iterdir() if path.suffix != ".json"
    } == FILES


def test_a_recipe_is_the_same_after_it_was_read() -> None:
    arguments = (ArgumentSpec(torch.float32, (3, 8)), ArgumentSpec(torch.int64, ()))
    targets = (Target("a", "a.0", 2, "in(x)", (0, "key", "0"), False, view=(2, 3)), into("fc"), out(""))
    wanted = Recipe(arguments, targets)
    record = VariantRecord.of(IDENTITY, wanted, Numerics.FAST, ("torch", Numerics.FAST), Built())
    read = VariantRecord.model_validate_json(record.model_dump_json())
    assert read.recipe == wanted
    assert read.key == record.key


def test_a_variant_is_for_its_model_in_its_environment_only(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    keys = {
        kept(store),
        kept(store, identity=("c" * 64, IDENTITY[1])),
        kept(store, identity=("a" * 64, "d" * 64)),
    }
    assert len(keys) == 3
    assert len(store.find(*IDENTITY)) == 1
    assert len(list(tmp_path.iterdir())) == 3  # others may use them


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def link(folder: Path) -> None:
    (folder / "graph.xml").rename(folder.parent / "elsewhere")
    (folder / "graph.xml").symlink_to(folder.parent / "elsewhere")


def replace_by_file(folder: Path) -> None:
    folder.rename(folder.parent / "away")
    folder.write_bytes(b"no folder")


def link_folder(folder: Path) -> None:
    folder.rename(folder.parent / "away")
    folder.symlink_to(folder.parent / "away")
    (folder / "graph.bin").write_bytes(b"other weights")


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of the graph": lambda folder: flip(folder / "graph.xml"),
    "a bit of the weights": lambda folder: flip(folder / "graph.bin"),
    "half of the weights": lambda folder: os.truncate(folder / "graph.bin", 1024),
    "no weights": lambda folder: (folder / "graph.bin").unlink(),
    "another file": lambda folder: (folder / "other.bin").write_bytes(b""),
    "a link": link,
    "a bit of the record": lambda folder: flip(folder / "variant.json"),
    "no record": lambda folder: (folder / "variant.json").unlink(),
    "half of the record": lambda folder: os.truncate(folder / "variant.json", 100),
    "the folder of another": lambda folder: folder.rename(folder.with_name("f" * 64)),
    "a file in its place": replace_by_file,
    "a link in its place": link_folder,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_what_differs_in_anything_is_removed_and_logged(tmp_path: Path, how: str) -> None:
    store = store_in(tmp_path)
    key = kept(store)
    DAMAGE[how](tmp_path / key)
    with capture_logs() as lines:
        for found in store.find(*IDENTITY):
            with pytest.raises(DamagedError):
                store.check(found)
    assert [line["event"] for line in lines] == ["kept variant removed"]
    assert not [path for path in tmp_path.iterdir() if len(path.name) == 64]
    assert not store.find(*IDENTITY)


def test_what_has_another_name_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder").mkdir()
    store = store_in(tmp_path, 4000)
    kept(store, "conv")
    kept(store, "fc")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "folder").is_dir()


def test_the_least_recently_used_go_when_there_is_no_room(tmp_path: Path) -> None:
    store = store_in(tmp_path, 8000)  # for two
    first, second = kept(store, "conv"), kept(store, "fc")
    os.utime(tmp_path / first, (1, 1))
    os.utime(tmp_path / second, (2, 2))
    store.touch(first)
    third = kept(store, "relu")
    assert {path.name for path in tmp_path.iterdir()} == {first, third}


def test_what_is_larger_than_the_store_is_not_kept_and_removes_nothing(tmp_path: Path) -> None:
    store = store_in(tmp_path, 4000)
    small = kept(store)
    folder = build(store, {"graph.bin": bytes(5000)})
    assert store.keep(folder, record_of("fc")) is None  # type: ignore[arg-type]
    folder.cleanup()  # type: ignore[attr-defined]
    assert [path.name for path in tmp_path.iterdir()] == [small]


def test_an_equal_one_takes_the_place_of_the_first(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert kept(store) == kept(store)
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("when", ["before the record", "before the rename"])
def test_a_killed_process_leaves_nothing_that_passes_for_a_variant(tmp_path: Path, when: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), when], check=False)
    assert done.returncode == -signal.SIGKILL
    store = store_in(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    assert not store.find(*IDENTITY)
    store.clean()
    assert not list(tmp_path.iterdir())
