"""A stream of random numbers of one's own, and the copies of buffers."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from trocar_server.errors import ServiceError
from trocar_server.training.step import rollback
from trocar_server.training.step.rollback import BufferBackup, RandomStream


def test_it_is_what_torch_draws_after_the_seed() -> None:
    stream = RandomStream(5, torch.device("cpu"))
    found = []
    for _ in range(3):
        with stream.in_place():
            found.append(torch.rand(4))
        torch.rand(7)  # somebody else's
    torch.manual_seed(5)
    assert torch.equal(torch.cat(found), torch.rand(12))


def test_what_fails_or_is_not_kept_moves_nothing() -> None:
    stream = RandomStream(5, torch.device("cpu"))
    with pytest.raises(KeyError), stream.in_place():
        _draw_and_fail()
    with stream.in_place(is_kept=False):
        torch.rand(1)
    with stream.in_place():
        found = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(found, torch.rand(1))


def test_others_see_nothing_of_it() -> None:
    torch.manual_seed(1)
    expected = torch.rand(2)
    torch.manual_seed(1)
    with pytest.raises(KeyError), RandomStream(5, torch.device("cpu")).in_place():
        _draw_and_fail()
    assert torch.equal(torch.rand(2), expected)


def test_it_goes_on_from_its_state() -> None:
    one, other = RandomStream(5, torch.device("cpu")), RandomStream(6, torch.device("cpu"))
    with one.in_place():
        torch.rand(3)
    other.load(one.state())
    with one.in_place():
        expected = torch.randn(5)
    with other.in_place():
        assert torch.equal(torch.randn(5), expected)


def test_streams_of_two_threads_take_turns() -> None:
    """Two servers of a process have a thread each, and torch one generator for both."""
    order: list[str] = []
    is_in, tries = threading.Event(), threading.Event()

    def other() -> None:
        is_in.wait()
        with ThreadPoolExecutor(1) as third:  # whether it would have to wait is known before it does
            order.append(
                "free" if third.submit(rollback._CPU_GENERATOR.acquire, blocking=False).result() else "held"
            )
        tries.set()
        with RandomStream(6, torch.device("cpu")).in_place():
            order.append("other")

    thread = threading.Thread(target=other)
    thread.start()
    with RandomStream(5, torch.device("cpu")).in_place():
        is_in.set()
        tries.wait()
        order.append("first")
    thread.join()
    assert order == ["held", "first", "other"]


def _draw_and_fail() -> None:
    torch.rand(9)
    raise KeyError


class Counting(nn.Module):
    """Writes to a buffer with a weight, or replaces it."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(2))


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_buffer_that_was_computed_with_a_weight_keeps_memory_and_value_without_its_graph(
    *, is_replaced: bool
) -> None:
    module = Counting()
    memory, backup = module.count, BufferBackup(module)
    backup.save()
    if is_replaced:
        module.count = module.count + module.weight
    else:
        module.count.add_(module.weight)
    backup.settle()
    assert module.count is memory
    assert not memory.requires_grad
    assert memory.tolist() == [1.0, 1.0]
    backup.restore()
    assert memory.tolist() == [0.0, 0.0]


def test_a_buffer_of_another_shape_is_refused() -> None:
    module = Counting()
    backup = BufferBackup(module)
    module.count = torch.zeros(3)
    with pytest.raises(ServiceError, match="'count' by one of another shape"):
        backup.settle()
