"""What is written and what stays in memory, each storage once."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.spool.steps import open_spool, wait_until_written
from trocar_server.spool import Spool
from trocar_server.spool.saved.packing import unpack
from trocar_server.spool.saved.saved import Copied, Kept, Saved


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    with open_spool(tmp_path, 0, min_bytes=1_000) as opened:
        yield opened


def there_and_back(spool: Spool, tensor: torch.Tensor) -> torch.Tensor:
    held = spool.packer.pack(tensor)
    wait_until_written(spool)
    return unpack(held)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last),
        torch.randn(1, 2, 4, 6, 6).to(memory_format=torch.channels_last_3d),
        torch.randn(40, 1).expand(40, 30),
        torch.randn(40, 30).T,
        torch.randn(40, 60)[:, ::2],
        torch.randn(4, 6, 70).permute(2, 0, 1),
        torch.randn(900)[100:],
        torch.randn(2000).unfold(0, 3, 2),
        torch.randn(300, dtype=torch.complex64),
        torch.randn(300, dtype=torch.complex128).conj(),
        torch.randn(300, dtype=torch.complex64).conj().imag,
        torch.randn(2000) > 0,
        torch.randn(2000).bfloat16(),
        torch.randn(2000).half(),
        torch.randn(2000).to(torch.float8_e4m3fn),
        torch.randint(-5, 5, (600,)),
        torch.randint(0, 255, (2000,), dtype=torch.uint8),
        torch.full((600,), float("nan")),
    ],
    ids=lambda tensor: f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}",
)
def test_a_tensor_comes_back_from_disk_as_it_was(spool: Spool, tensor: torch.Tensor) -> None:
    found = there_and_back(spool, tensor)
    assert spool.report().written_bytes > 0
    assert found.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert found.storage_offset() == tensor.storage_offset()
    assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert found.data_ptr() % 64 == tensor.data_ptr() % 64
    assert torch.equal(bits(found), bits(tensor))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


class Subclass(torch.Tensor):
    pass


KEPT: dict[str, Callable[[], torch.Tensor]] = {
    "empty": lambda: torch.empty(0, 1000),
    "scalar": lambda: torch.tensor(1.0),
    "small": lambda: torch.randn(249),
    "sparse": lambda: torch.eye(400).to_sparse(),
    "sparse rows": lambda: torch.eye(400).to_sparse_csr(),
    "quantised": lambda: torch.quantize_per_tensor(torch.randn(1000), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(400), torch.randn(300)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(400), torch.randn(300)], layout=torch.jagged),
    "subclass": lambda: torch.randn(1000).as_subclass(Subclass),
    "meta": lambda: torch.empty(1000, device="meta"),
    "no elements at all": lambda: torch._efficientzerotensor(1000),  # pyright: ignore[reportPrivateImportUsage] - torch has no public one
    "parameter": lambda: nn.Parameter(torch.randn(40, 40)),
    "view of a parameter": lambda: nn.Parameter(torch.randn(40, 40)).T[1:],
    "frozen parameter": lambda: nn.Parameter(torch.randn(40, 40), requires_grad=False),
    "view of a frozen parameter": lambda: nn.Parameter(torch.randn(40, 40), requires_grad=False).view(-1),
    "leaf": lambda: torch.randn(1000, requires_grad=True),
    "view of a leaf": lambda: torch.randn(10, 100, requires_grad=True)[1:],
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_or_need_not_be_written_stays(spool: Spool, name: str) -> None:
    tensor = KEPT[name]()
    held = spool.packer.pack(tensor)
    assert type(held) is Kept
    found = unpack(held)
    assert (type(found), found.layout, found.numel()) == (type(tensor), tensor.layout, tensor.numel())
    assert found is tensor or found.grad_fn is None
    assert spool.report().unique_bytes == 0


def test_a_storage_is_one_block_however_often_it_is_saved(spool: Spool) -> None:
    whole = torch.randn(20, 30)
    held = [
        spool.packer.pack(view)
        for view in (whole, whole, whole.T, whole.detach(), whole[:, :25], whole.view(-1))
    ]
    assert spool.report().unique_bytes == whole.nbytes
    assert spool.report().saved_bytes == 5 * whole.nbytes + 20 * 25 * 4
    wait_until_written(spool)
    assert spool.report().written_bytes == 4096
    assert all(
        torch.equal(unpack(one), view) for one, view in zip(held[:3], (whole, whole, whole.T), strict=True)
    )
    whole.add_(1)
    held.append(spool.packer.pack(whole))
    assert spool.report().unique_bytes == 2 * whole.nbytes


def test_a_block_is_forgotten_with_its_last_user_not_with_its_storage(spool: Spool) -> None:
    whole = torch.randn(20, 30)
    first = spool.packer.pack(whole)
    del first
    second = spool.packer.pack(whole)
    assert spool.report().unique_bytes == 2 * whole.nbytes
    expected = whole.clone()
    del whole
    others = [spool.packer.pack(torch.randn(20, 30)) for _ in range(20)]
    assert torch.equal(unpack(second), expected)
    del others


def test_a_small_part_uses_the_whole_where_that_is_saved(spool: Spool) -> None:
    whole = torch.randn(200, 300)
    parts = [spool.packer.pack(whole[:5]), spool.packer.pack(whole), spool.packer.pack(whole[5:10])]
    assert spool.report().unique_bytes == whole[:5].nbytes + whole.nbytes
    assert torch.equal(unpack(parts[0]), whole[:5])
    assert torch.equal(unpack(parts[2]), whole[5:10])


def test_a_tiny_part_does_not_keep_the_memory_around_it(spool: Spool) -> None:
    whole = torch.randn(200, 300)
    held = [spool.packer.pack(view) for view in (whole[3, :20], whole[:, 7], whole[3, 5])]
    assert [type(one) for one in held] == [Copied] * 3
    expected = [whole[3, :20].clone(), whole[:, 7].clone(), whole[3, 5].clone()]
    found = [unpack(one) for one in held]
    assert all(map(torch.equal, found, expected))
    assert [tensor.stride() for tensor in found] == [(1,), (300,), ()]
    address = whole.untyped_storage().data_ptr()
    assert all(tensor.untyped_storage().data_ptr() != address for tensor in found)


def test_memory_of_modules_and_tensors_is_kept_on_demand(tmp_path: Path) -> None:
    norm, table, mask = nn.BatchNorm1d(400), nn.Embedding(30, 30), torch.ones(20, 30)
    with open_spool(tmp_path, keep=[norm, table, mask]) as spool:
        with spool:
            for tensor in (norm.running_mean, table.weight.detach(), mask.T):
                assert tensor is not None
                assert type(spool.packer.pack(tensor)) is Kept
        norm.double()  # has other memory from now on
        with spool:
            assert norm.running_mean is not None
            assert type(spool.packer.pack(norm.running_mean)) is Kept
        assert type(spool.packer.pack(torch.ones(20, 30))) is Saved


def test_memory_that_was_kept_may_become_something_else(tmp_path: Path) -> None:
    with open_spool(tmp_path) as spool:
        for _ in range(50):
            buffer = torch.randn(600)
            spool.packer.keep([buffer])
            del buffer
            assert type(spool.packer.pack(torch.randn(600))) is Saved


def test_the_report_counts_what_stays(spool: Spool) -> None:
    for tensor in (
        nn.Parameter(torch.randn(1000)),
        torch.randn(20),
        torch.randn(1000),
        torch.eye(400).to_sparse(),
    ):
        spool.packer.pack(tensor)
    report = spool.report()
    assert (report.saved_bytes, report.kept_bytes) == (8_080, 4_080)
