"""What goes through page-locked memory arrives as it was, late copies or not; on a GPU where there is one."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tests.support.oracles.transfer_devices import RUBBISH, LateBackend, late_transfers
from trocar_server.engine.transfer import StreamTransfers, this_thread, transfers_of, using
from trocar_server.engine.transfer.cuda import CudaBackend
from trocar_server.engine.transfer.transfers import HOST, Transfers

CPU = torch.device("cpu")

VALUES = [
    torch.randn(3, 5),
    torch.randn(7, 3, 2).transpose(0, 2),
    torch.randn(4, 3, 6, 6).to(memory_format=torch.channels_last),
    torch.randn(10)[::3],
    torch.tensor(2.5),
    torch.randn(1, 4).expand(5, 4),
    torch.tensor([True, False, True]),
    torch.arange(12, dtype=torch.int64).reshape(3, 4).T,
    torch.randn(3, 2).to(torch.bfloat16),
    torch.randn(3, 2).to(torch.float8_e4m3fn),
    torch.randn(3, dtype=torch.complex64),
    torch.tensor([float("nan"), float("inf"), -0.0]),
    torch.empty(0, 3),
]


@pytest.fixture
def backend() -> LateBackend:
    return LateBackend(is_held=True)


@pytest.fixture
def transfers(backend: LateBackend) -> Iterator[StreamTransfers]:
    found = late_transfers(backend)
    yield found
    found.close()


def as_host(value: torch.Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("inference", [True, False])
def test_bytes_are_those_of_the_value_in_row_major_order(
    backend: LateBackend, transfers: StreamTransfers, value: torch.Tensor, inference: bool
) -> None:
    with torch.inference_mode(inference):
        payload = transfers.to_host(value.clone())
    backend.finish(backend.begun_count)
    transfers.wait()
    assert payload.tobytes() == as_host(value)
    assert backend.begun_count == (value.nbytes > 0)


def test_a_piece_of_a_pass_without_gradients_takes_values_of_one_with_them(
    backend: LateBackend, transfers: StreamTransfers
) -> None:
    backend.is_held = False
    with torch.inference_mode():
        transfers.to_host(torch.ones(4))
    transfers.wait()
    with torch.no_grad():
        payload = transfers.to_host(torch.full((4,), 2.0, requires_grad=True))
    transfers.wait()
    assert payload.view(np.float32).tolist() == [2.0] * 4
    assert len(backend.allocated) == 1


def test_the_bytes_are_not_there_before_the_copy_is_done(
    backend: LateBackend, transfers: StreamTransfers
) -> None:
    payload = transfers.to_host(torch.zeros(100))
    assert transfers.has_begun
    assert (payload == RUBBISH).all()
    backend.finish()
    assert not payload.any()


async def test_who_takes_the_copies_waits_for_the_last_of_them(
    backend: LateBackend, transfers: StreamTransfers
) -> None:
    for _ in range(3):
        transfers.to_host(torch.zeros(100))
    copies = transfers.take()
    assert copies is not None
    assert transfers.take() is None
    waiting = asyncio.ensure_future(copies.arrived())
    await asyncio.to_thread(backend.finish, 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    backend.finish()
    await waiting


async def test_an_error_of_a_copy_reaches_who_waits(backend: LateBackend, transfers: StreamTransfers) -> None:
    transfers.to_host(torch.zeros(100))
    copies = transfers.take()
    assert copies is not None
    backend.finish(error=RuntimeError("the device is gone"))
    with pytest.raises(RuntimeError, match="the device is gone"):
        await copies.arrived()


async def test_who_is_cancelled_does_not_disturb_the_next(
    backend: LateBackend, transfers: StreamTransfers
) -> None:
    taken = []
    for _ in range(3):
        transfers.to_host(torch.zeros(100))
        copies = transfers.take()
        assert copies is not None
        taken.append(asyncio.ensure_future(copies.arrived()))
    await asyncio.sleep(0)
    taken[0].cancel()
    taken[1].cancel()
    await asyncio.gather(*taken[:2], return_exceptions=True)
    backend.finish(3)
    await taken[2]


def test_a_copy_that_does_not_begin_leaves_its_piece(
    backend: LateBackend, transfers: StreamTransfers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("launch failure")

    with monkeypatch.context() as patched:
        patched.setattr(backend, "download", fail)
        with pytest.raises(RuntimeError, match="launch failure"):
            transfers.to_host(torch.zeros(100))
    assert not transfers.has_begun
    transfers.to_host(torch.zeros(100))
    backend.finish()
    transfers.wait()
    assert len(backend.allocated) == 1


def test_over_the_bound_a_copy_is_made_at_once(backend: LateBackend) -> None:
    transfers = late_transfers(backend, max_bytes=1 << 16)
    first = transfers.to_host(torch.zeros(100))
    second = transfers.to_host(torch.ones(100))
    assert (first == RUBBISH).all()
    assert second.view(np.float32).tolist() == [1.0] * 100
    assert backend.begun_count == 1
    backend.finish()
    transfers.close()


def test_what_is_small_is_copied_at_once(backend: LateBackend) -> None:
    transfers = StreamTransfers(CPU, backend, 1 << 20, least_bytes=400)
    assert transfers.to_host(torch.ones(99)).view(np.float32).tolist() == [1.0] * 99
    assert torch.equal(transfers.to_device(torch.ones(99), CPU), torch.ones(99))
    assert not transfers.has_begun
    transfers.to_host(torch.ones(100))
    assert transfers.has_begun
    backend.finish()
    transfers.close()


def test_what_is_on_another_device_is_copied_at_once(backend: LateBackend) -> None:
    transfers = late_transfers(backend, device=torch.device("cuda"))
    assert transfers.to_host(torch.ones(5)).view(np.float32).tolist() == [1.0] * 5
    assert not transfers.has_begun
    transfers.close()


# --- To the device --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", VALUES)
def test_inputs_come_to_the_device_as_they_were(
    backend: LateBackend, transfers: StreamTransfers, value: torch.Tensor
) -> None:
    found = transfers.to_device(value, CPU)
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    assert found.stride() == value.to(CPU).stride()
    assert as_host(found) == as_host(value)
    assert backend.upload_count == (value.is_contiguous() and value.nbytes > 0)


def test_an_input_of_many_chunks_comes_whole(backend: LateBackend, transfers: StreamTransfers) -> None:
    value = torch.randn((9 << 20) // 4 + 1)
    assert torch.equal(transfers.to_device(value, CPU), value)
    assert backend.upload_count == 3
    assert len(backend.allocated) == 1


def test_inputs_use_the_memory_of_those_before(backend: LateBackend, transfers: StreamTransfers) -> None:
    values = [torch.full((50_000,), float(number)) for number in range(5)]
    found = [transfers.to_device(value, CPU) for value in values]
    assert all(torch.equal(one, other) for one, other in zip(found, values, strict=True))
    assert len(backend.allocated) == 1


def test_an_input_can_need_gradients(backend: LateBackend, transfers: StreamTransfers) -> None:
    with torch.inference_mode():
        transfers.to_device(torch.ones(4), CPU)
    found = transfers.to_device(torch.ones(4), CPU).requires_grad_()
    (found * 3).sum().backward()
    assert found.grad is not None
    assert found.grad.tolist() == [3.0] * 4


# --- Whose transfers ------------------------------------------------------------------------------


def test_a_cpu_copies_nothing() -> None:
    value = torch.randn(3, 4)
    assert transfers_of(CPU) is HOST
    assert HOST.to_device(value, CPU) is value
    assert HOST.to_host(value).ctypes.data == value.data_ptr()
    assert HOST.take() is None


def test_transfers_belong_to_their_thread_and_are_closed(backend: LateBackend) -> None:
    transfers: Transfers = late_transfers(backend)
    with using(transfers):
        assert this_thread.transfers is transfers
    assert this_thread.transfers is HOST
    transfers.to_host(torch.ones(3))
    with pytest.raises(RuntimeError, match="shutdown"):
        transfers.take()


# --- On a GPU -------------------------------------------------------------------------------------


def gpu_transfers(most_bytes: int) -> StreamTransfers:
    device = torch.device("cuda")
    return StreamTransfers(device, CudaBackend(device), most_bytes, least_bytes=1)


@pytest.mark.cuda
@pytest.mark.parametrize("value", VALUES)
def test_a_gpu_gives_the_bytes_that_cpu_gives(value: torch.Tensor) -> None:
    transfers = gpu_transfers(1 << 30)
    on_gpu = value.cuda()
    payload = transfers.to_host(on_gpu)
    transfers.wait()
    assert payload.tobytes() == as_host(on_gpu.cpu())
    back = transfers.to_device(value, torch.device("cuda"))
    assert as_host(back.cpu()) == as_host(value)
    transfers.close()


@pytest.mark.cuda
def test_memory_that_a_copy_still_reads_is_not_given_to_the_next_pass() -> None:
    """Each round drops its value at once and writes over freed memory while the copy may be under way."""
    transfers = gpu_transfers(1 << 30)
    payloads = []
    for number in range(20):
        payloads.append(transfers.to_host(torch.full((8 << 20,), float(number), device="cuda")))
        torch.full((8 << 20,), -1.0, device="cuda")
    transfers.wait()
    assert [set(payload.view(np.float32)[:: 1 << 16].tolist()) for payload in payloads] == [
        {float(number)} for number in range(20)
    ]
    transfers.close()


@pytest.mark.cuda
def test_inputs_come_through_while_a_gpu_computes() -> None:
    transfers = gpu_transfers(1 << 30)
    weight = torch.eye(2048, device="cuda")
    for number in range(20):
        value = torch.full((2048, 2048), float(number))
        found = transfers.to_device(value, torch.device("cuda"))
        value.fill_(-1.0)
        assert torch.equal((found @ weight).cpu(), torch.full((2048, 2048), float(number)))
        del found
    transfers.close()


@pytest.mark.cuda
def test_a_copy_waits_for_a_value_that_is_computed_late() -> None:
    transfers = gpu_transfers(1 << 30)
    payloads = []
    for number in range(10):
        value = torch.zeros(8 << 20, device="cuda")
        torch.cuda._sleep(20_000_000)
        value.fill_(float(number))
        payloads.append(transfers.to_host(value))
    transfers.wait()
    assert [set(payload.view(np.float32)[:: 1 << 16].tolist()) for payload in payloads] == [
        {float(number)} for number in range(10)
    ]
    transfers.close()


@pytest.mark.cuda
def test_a_pass_waits_for_inputs_that_arrive_late() -> None:
    transfers = gpu_transfers(4 << 30)
    for number in range(4):
        value = torch.full((64 << 20,), float(number))
        found = transfers.to_device(value, torch.device("cuda"))
        last = found[-1:].clone()  # the end of it is copied last
        assert last.tolist() == [float(number)]
    transfers.close()
