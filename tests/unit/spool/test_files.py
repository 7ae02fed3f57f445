"""What is in the files of a spool while its graphs live, and when they go."""

import gc
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

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
from trocar_server.spool.files import file_pool as pool_module


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """What the library finds in a file, without the gaps."""
    with safe_open(path, "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if not name.startswith("gap")}  # noqa: SIM118


def test_the_library_reads_what_autograd_saved(tmp_path: Path) -> None:
    values = [
        torch.randn(40, 50, requires_grad=True),
        torch.randn(3000, dtype=torch.float64, requires_grad=True),
        torch.randn(2000, dtype=torch.complex64, requires_grad=True),
        torch.randn(3001).bfloat16().requires_grad_(),
    ]
    with open_spool(tmp_path) as spool:
        with spool:
            made = [value * 2 for value in values]
            results = [value.pow(3) for value in made]
        wait_until_written(spool)
        found = [tensor for path in files(tmp_path) for tensor in tensors(path).values()]
        assert {(tensor.dtype, tensor.numel()) for tensor in found} == {(v.dtype, v.numel()) for v in values}
        for value in made:
            assert any(f.dtype == value.dtype and torch.equal(f, value.detach()) for f in found)
        del results


def test_a_full_file_is_valid_while_the_graph_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_CHUNK_BYTES", 1 << 18)
    model = small_model()
    with open_spool(tmp_path, keep=[model]) as spool:
        with spool:
            loss = model(batch()).square().sum()
        wait_until_written(spool)
        paths = files(tmp_path)
        assert len(paths) > 2
        assert all(tensors(path) for path in paths)
        assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}
        loss.backward()


def test_booleans_are_bits_on_disk(tmp_path: Path) -> None:
    x = torch.randn(100, 200, requires_grad=True)
    mask = torch.rand(100, 200) < 0.3
    with open_spool(tmp_path) as spool:
        with spool:
            loss = torch.where(mask, x, 0.0).sum()
        wait_until_written(spool)
        (found,) = tensors(files(tmp_path)[0]).values()
        assert found.numel() == 2500
        loss.backward()
        assert x.grad is not None
        assert torch.equal(x.grad, mask.float())
        assert spool.report().packed_bytes == 20_000


@pytest.mark.parametrize(("store_dtype", "tolerance"), [("bf16", 2e-2), ("int8", 2e-1)])
def test_lossy_dtypes_are_close_and_said_in_the_report(
    tmp_path: Path, store_dtype: str, tolerance: float
) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, store_dtype=store_dtype, keep=[model]) as spool:
        found = gradients(model, spool)
        report = spool.report()
    assert not are_equal(found, expected)
    for gradient, exact in zip(found, expected, strict=True):
        assert (gradient - exact).norm() <= tolerance * exact.norm()
    assert report.lossy_bytes > 300_000
    assert report.written_bytes < report.lossy_bytes * 0.6
    assert any(f"store_dtype={store_dtype}" in note for note in report.notes)


def test_lossy_dtypes_change_nothing_that_stays_in_memory(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path, 1 << 30, store_dtype="int8") as spool:
        assert are_equal(gradients(model, spool), expected)
        assert spool.report().lossy_bytes == 0


def test_bytes_seen_as_two_dtypes_keep_both_meanings(tmp_path: Path) -> None:
    x = torch.randn(4000, requires_grad=True)
    bits = torch.arange(4000, dtype=torch.int32) + (127 << 23)
    with open_spool(tmp_path, store_dtype="bf16") as spool:
        with spool:
            first = (x * bits.view(torch.float32)).sum()
            second = x[bits.remainder(4000)].sum()
        wait_until_written(spool)
        (first + second).backward()
    assert x.grad is not None
    seen = bits.view(torch.float32).bfloat16().float()
    assert torch.equal(x.grad, seen + torch.bincount(bits.remainder(4000), minlength=4000))


def test_files_are_used_again_step_after_step(tmp_path: Path) -> None:
    model = small_model()
    with open_spool(tmp_path) as spool:
        gradients(model, spool)
        before = {path.stat().st_ino for path in files(tmp_path)}
        for _ in range(20):
            gradients(model, spool)
        assert {path.stat().st_ino for path in files(tmp_path)} == before
        assert spool.report().file_count == len(before)


def test_files_of_a_graph_that_was_never_used_are_free_again(tmp_path: Path) -> None:
    model = small_model()
    with open_spool(tmp_path) as spool:
        for _ in range(4):
            with spool:
                model(batch())
            gc.collect()
        assert spool.report().file_count <= 2


def test_two_spools_share_a_folder(tmp_path: Path) -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(tmp_path) as first, open_spool(tmp_path) as second:
        for _ in range(3):
            assert are_equal(gradients(model, first), expected)
            assert are_equal(gradients(model, second), expected)
        assert len(list(tmp_path.iterdir())) == 2
        first.close()
        assert are_equal(gradients(model, second), expected)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs here")
def test_a_filesystem_in_memory_works_too() -> None:
    model = small_model()
    expected = gradients(model)
    with open_spool(Path("/dev/shm"), checksum=True) as spool:
        assert are_equal(gradients(model, spool), expected)
        assert spool.report().written_bytes > 300_000


EXIT = """
import sys
from pathlib import Path
from tests.unit.spool.steps import batch, small_model
from trocar_server.spool import Spool
spool = Spool(sys.argv[1], 0, min_bytes=1024)
with spool:
    loss = small_model()(batch()).sum()
assert spool.report().written_bytes
"""


def test_a_process_that_ends_takes_its_folder_along(processes: Processes, tmp_path: Path) -> None:
    ended = processes.run(EXIT, tmp_path)
    assert (ended.returncode, ended.errors) == (0, "")
    assert list(tmp_path.iterdir()) == []
