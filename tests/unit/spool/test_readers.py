"""Another process that reads the folder while a model trains: what is named as a safetensors file is one."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.files.scale import count
from tests.support.spool.spool_processes import Processes
from tests.unit.spool.steps import (
    are_equal,
    batch,
    files,
    gradients,
    open_spool,
    small_model,
    wait_until_written,
)
from trocar_server.spool import Spool
from trocar_server.spool.files import file_pool as pool_module

STEPS = count(25, "TROCAR_SPOOL_READER_STEPS")

READER = """
import hashlib, json, os, sys, time
from pathlib import Path
from safetensors import safe_open

parent, seen, invalid, changed, held = Path(sys.argv[1]), 0, [], [], {}

def digest(file):
    found = hashlib.sha256()
    for name in sorted(file.keys()):
        found.update(name.encode() + file.get_tensor(name).numpy().tobytes())
    return found.hexdigest()

while not (parent / "stop").exists():
    for path in parent.glob("trocar-spool-*/*.safetensors"):
        try:
            file = safe_open(path, "pt")
            before = digest(file)
        except Exception as error:
            if "No such file" not in str(error):  # gone, at either of the two times that the library opens it
                invalid.append(f"{path.name}: {error}")
            continue
        seen += 1
        if before != digest(file):
            changed.append(path.name)
        if seen % 3 == 0 and len(held) < 4:
            held[path.name] = file, before
    if len(held) == 4:
        name = next(iter(held))
        file, before = held.pop(name)  # open for a while, when the spool has gone on
        if digest(file) != before:
            changed.append(name)
        del file
print(json.dumps({"seen": seen, "invalid": invalid[:5], "changed": changed[:5]}))
"""


def test_what_another_process_sees_is_valid_and_does_not_change(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_CHUNK_BYTES", 1 << 18)  # several files for a step
    output, errors = tmp_path.with_name("readers.output"), tmp_path.with_name("readers.errors")
    reader = processes.start(READER, [str(tmp_path)], output, errors)
    model = small_model()
    expected = gradients(model)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    with open_spool(tmp_path) as spool:
        for step in range(STEPS):
            found = gradients(model, spool)
            assert are_equal(found, expected)
            optimiser.step()
            if step % 10 == 0:
                spool.store.disk.pool.rest(0.0)
        report = spool.report()
        (tmp_path / "stop").touch()
        assert processes.wait(reader) == 0, errors.read_text()  # before the folder is removed
    found_out = json.loads(output.read_text())
    assert found_out["seen"] > 0
    assert (found_out["invalid"], found_out["changed"]) == ([], [])
    assert report.written_bytes > STEPS * 200_000


def saved_names(spool: Spool, folder: Path) -> tuple[str, dict[str, list[int]]]:
    """Return the name of the file of a step, and the names and shapes of the tensors in it."""
    x = torch.randn(20, 30, requires_grad=True)
    with spool:
        loss = (x @ torch.ones(30, 40)).exp().sum()
    wait_until_written(spool)
    (path,) = files(folder)
    with safe_open(path, "pt") as file:
        found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    loss.backward()
    return path.name, {name: shape for name, shape in found.items() if not name.startswith("gap")}


def test_names_say_what_was_saved(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        saved_names(spool, tmp_path)
        file, tensors = saved_names(spool, tmp_path)
    assert file.startswith("step-000002-blocks-000003-000004-file-")
    assert tensors == {
        "step-000002-block-000003-no-operation": [30, 40],
        "step-000002-block-000004-ExpBackward0": [20, 40],
    }


def test_a_reader_that_holds_a_file_keeps_it_as_it_was(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as spool:
        with spool:
            loss = model(batch()).square().sum()
        wait_until_written(spool)
        (path,) = files(tmp_path)
        with safe_open(path, "pt") as file:
            before = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            loss.backward()
            del loss
            for _ in range(3):
                assert are_equal(gradients(model, spool), expected)
            assert all(torch.equal(file.get_tensor(name), before[name]) for name in before)
