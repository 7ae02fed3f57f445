"""Bytes that a pass holds: what counts, for how long, and what torch's profiler sees of a real pass."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from tests.support.models.odd_models import CatchesErrors, Recursive
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import rebuilt_by_name
from tests.unit.surgery.recordings import recorded
from trocar_server.surgery import Recording, record_calls
from trocar_server.surgery.recording.liveness import LiveBytes
from trocar_server.surgery.recording.writes import WriteWatch

KIB = 1024


@pytest.fixture
def live() -> Iterator[LiveBytes]:
    """Counts what the test makes on the meta device."""
    with WriteWatch() as watch, torch.device("meta"):
        watch.live = LiveBytes()
        yield watch.live


def kib(count: int = 1) -> torch.Tensor:
    return torch.empty(count * KIB // 4)


# --- What counts ------------------------------------------------------------------------------------------


def test_what_lives_counts_and_what_is_dropped_does_not(live: LiveBytes) -> None:
    first, second = kib(3), kib(2)
    del first
    third = kib(4)
    assert (live.current, live.peak) == (6 * KIB, 6 * KIB)
    del second, third
    assert (live.current, live.peak) == (0, 6 * KIB)


def test_a_view_keeps_the_whole_and_counts_nothing(live: LiveBytes) -> None:
    whole = kib(4)
    views = [whole[:1], whole.view(2, -1), *whole.chunk(4), whole.detach(), whole.expand(3, -1)]
    assert live.current == 4 * KIB
    del whole
    assert live.current == 4 * KIB
    views.clear()
    assert live.current == 0


def test_a_view_that_does_not_say_so_counts_nothing(live: LiveBytes) -> None:
    whole = kib(4)
    view = torch.ops.aten._unsafe_view.default(whole, [2, 512])
    assert view.shape == (2, 512)
    assert live.current == 4 * KIB


def test_what_works_in_place_counts_nothing(live: LiveBytes) -> None:
    value = kib(4)
    value.add_(1).relu_()
    torch.neg(value, out=value)
    assert live.peak == 4 * KIB


def test_what_out_makes_larger_counts(live: LiveBytes) -> None:
    value, target = kib(4), torch.empty(0)
    torch.neg(value, out=target)
    assert live.current == 8 * KIB


def test_every_tensor_of_many_counts(live: LiveBytes) -> None:
    values, indices = kib(4).view(4, -1).max(dim=0)
    parts = torch.ops.aten.split_copy.Tensor(values, 128)
    assert live.current == values.nbytes + indices.nbytes + sum(part.nbytes for part in parts)


def test_what_was_there_before_counts_nothing() -> None:
    before = torch.empty(KIB, device="meta")
    with WriteWatch() as watch:
        watch.live = LiveBytes()
        view = before[1:]
        after = view.clone()
        assert watch.live.current == after.nbytes


def test_what_has_no_storage_counts_nothing(live: LiveBytes) -> None:
    sparse = torch.empty(4, 4, layout=torch.sparse_coo)
    assert sparse.is_sparse
    assert live.peak <= KIB


# --- Calls ------------------------------------------------------------------------------------------------


class Steps(nn.Module):
    """Makes 4, then 8, then 2 times its input."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large, self.last = (Repeats(count) for count in (4, 8, 2))

    def forward(self, x: torch.Tensor) -> Any:
        self.small(x)
        self.large(x)
        return self.last(x)


class Repeats(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat(self.count)


def test_a_call_knows_the_most_that_was_held_before_and_until_its_end() -> None:
    recording = recorded(Steps, (256,))
    peaks = {
        path: [(call.peak_bytes_before, call.peak_bytes) for call in record.calls]
        for path, record in recording.modules.items()
    }
    assert peaks == {
        "": [(0, 8 * KIB)],
        "small": [(0, 4 * KIB)],
        "large": [(4 * KIB, 8 * KIB)],
        "last": [(8 * KIB, 8 * KIB)],
    }
    assert recording.peak_bytes == 8 * KIB


@pytest.mark.parametrize("kind", [Recursive, CatchesErrors])
def test_calls_inside_calls_and_calls_that_raise_have_peaks_in_order(kind: type[nn.Module]) -> None:
    recording = recorded(kind, (KIB,))
    calls = [call for record in recording.modules.values() for call in record.calls]
    by_end = sorted(calls, key=lambda call: call.ended)
    assert all(call.peak_bytes_before <= call.peak_bytes for call in calls)
    assert [call.peak_bytes for call in by_end] == sorted(call.peak_bytes for call in by_end)
    assert recording.peak_bytes == by_end[-1].peak_bytes > 0


def test_what_the_first_pass_of_a_recording_keeps_does_not_count() -> None:
    """It keeps every value, which is three times what the model holds at once."""
    model = nn.Sequential(*(nn.Identity() if i % 2 else nn.Sigmoid() for i in range(12))).to("meta")
    recording = record_calls(model, [torch.empty(KIB, device="meta")])
    assert recording.peak_bytes == 2 * 4 * KIB


def test_a_recording_with_data_has_no_peaks() -> None:
    recording = recorded(Plain, (2, 3, 8, 8), is_symbolic=False)
    calls = [call for record in recording.modules.values() for call in record.calls]
    assert recording.peak_bytes == 0
    assert all(call.peak_bytes == call.peak_bytes_before == 0 for call in calls)


# --- Against the profiler ---------------------------------------------------------------------------------


@pytest.fixture
def two_threads() -> Iterator[None]:
    """What a server has: with one thread torch leaves some convolutions to a kernel that needs less."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def true_peak(work: Callable[[], object]) -> int:
    """Return the most bytes that torch's allocator had given out at a time, as its profiler saw it."""
    with torch.inference_mode():
        work()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            work()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    sizes: list[int] = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(accumulate(sizes))


def estimated(model: nn.Module, *shape: int) -> Recording:
    return record_calls(model.to("meta"), [torch.empty(*shape, device="meta")])


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("resnet18", (8, 3, 64, 64)),
        ("resnet18", (2, 3, 224, 224)),
        ("resnet50", (8, 3, 64, 64)),
        ("vit_b_16", (1, 3, 224, 224)),
        ("densenet121", (8, 3, 64, 64)),
        ("mobilenet_v3_large", (4, 3, 96, 96)),
        ("mobilenet_v3_small", (8, 3, 64, 64)),
        ("swin_t", (4, 3, 64, 64)),
    ],
)
def test_the_estimate_is_within_a_tenth_of_a_real_pass(name: str, shape: tuple[int, ...]) -> None:
    model, images = rebuilt_by_name(name), torch.rand(shape)
    assert estimated(rebuilt_by_name(name), *shape).peak_bytes == pytest.approx(
        true_peak(lambda: model(images)), rel=0.1
    )


@pytest.mark.usefixtures("two_threads")
def test_a_part_of_the_pass_has_its_own_estimate() -> None:
    model, images = rebuilt_by_name("resnet18"), torch.rand(8, 3, 64, 64)
    parts = [model.conv1, model.bn1, model.relu, model.maxpool, model.layer1]
    call = estimated(rebuilt_by_name("resnet18"), *images.shape).modules["layer1"].calls[0]
    assert call.peak_bytes == pytest.approx(true_peak(lambda: nn.Sequential(*parts)(images)), rel=0.1)


class Attention(nn.Module):
    """Attention over many tokens, whose scores would be 16 times its values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x + 1, x + 2) * 2


def test_attention_counts_as_one_kernel() -> None:
    tokens = torch.rand(2, 4, 512, 32)
    found = estimated(Attention(), *tokens.shape).peak_bytes
    assert found == pytest.approx(true_peak(lambda: Attention()(tokens)), rel=0.2)
