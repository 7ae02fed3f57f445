"""A state goes on bit for bit, and one that somebody made up is refused or harmless."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np
import pytest
import torch
from safetensors.torch import load

from tests.unit.tensors.stats.oracle import PLAIN
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import (
    Accumulator,
    Scope,
    Statistic,
    StatisticParameters,
    StatisticsResult,
    sketch,
    state_byte_count,
)

QUANTILES = (0.0, 0.1, 0.5, 1.0)
GRID = StatisticParameters(quantiles=QUANTILES, bin_count=7)
EDGES = StatisticParameters(quantiles=QUANTILES, edges=(-2.0, 0.0, 0.5))
MUTATIONS = 20_000
T = TypeVar("T")

Request = tuple[tuple[Statistic, ...], Scope, int | None, StatisticParameters]
BOTH = (*PLAIN, Statistic.QUANTILES, Statistic.HISTOGRAM)
REQUESTS: tuple[Request, ...] = (
    ((*BOTH, Statistic.ARGMAX_CHANNEL), Scope.ALL, None, GRID),
    ((*BOTH, Statistic.COVARIANCE), Scope.CHANNEL, -2, EDGES),
)


def batches(dtype: torch.dtype = torch.float32) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    for size in (3, 1, 40, 2):
        yield torch.randn(size, 3, 5, generator=generator).to(dtype) * size


@pytest.fixture
def _small_sketch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets so few elements be held that these batches make several collapses."""
    monkeypatch.setattr(sketch, "HELD_ELEMENTS", 96)
    monkeypatch.setattr(sketch, "MIN_CAPACITY", 16)


def bits(result: StatisticsResult) -> list[object]:
    numbers = np.concatenate([np.array(values) for values in result.values.values()])
    matrix = b"" if result.covariance is None else result.covariance.numpy().tobytes()
    return [numbers.tobytes(), result.edges, result.rank_error, matrix, result.channel_dim]


@pytest.mark.usefixtures("_small_sketch")
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_going_on_from_a_state_is_the_same_bit_for_bit(request_: Request, dtype: torch.dtype) -> None:
    unbroken, broken = Accumulator(*request_), Accumulator(*request_)
    for batch in batches(dtype):
        unbroken.update(batch)
        broken = Accumulator.from_state(*request_, broken.state())
        broken.update(batch)
        assert bits(broken.result()) == bits(unbroken.result())
    assert broken.state() == unbroken.state()
    assert unbroken.result().rank_error > 0.0


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_state_of_nothing_is_nothing(request_: Request) -> None:
    empty = Accumulator(*request_)
    assert bits(Accumulator.from_state(*request_, empty.state()).result()) == bits(empty.result())


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_state_of_empty_tensors_goes_on(request_: Request) -> None:
    empty = Accumulator(*request_)
    empty.update(torch.empty(0, 3, 5))
    resumed = Accumulator.from_state(*request_, empty.state())
    for accumulator in (empty, resumed):
        accumulator.update(torch.ones(2, 3, 5))
    assert bits(resumed.result()) == bits(empty.result())


@pytest.mark.usefixtures("_small_sketch")
@pytest.mark.parametrize("request_", REQUESTS)
def test_a_state_is_no_larger_than_foretold(request_: Request) -> None:
    statistics, scope, channel_dim, parameters = request_
    accumulator = Accumulator(*request_)
    foretold = state_byte_count(statistics, scope, (9, 3, 5), channel_dim, parameters)
    for batch in batches(torch.float64):
        accumulator.update(batch)
        assert foretold - 8192 < len(accumulator.state()) <= foretold


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_was_fed_in_inference_mode_goes_on_outside(request_: Request) -> None:
    inside, outside = Accumulator(*request_), Accumulator(*request_)
    for batch in batches():
        with torch.inference_mode():
            inside.update(batch.clone())
        outside.update(batch.requires_grad_())
    for accumulator in (inside, outside):
        accumulator.update(torch.ones(1, 3, 5))
    assert bits(inside.result()) == bits(outside.result())
    assert inside.state() == outside.state()


def test_only_values_with_the_same_channels_fit() -> None:
    of_channels = Accumulator((Statistic.MEAN,), Scope.CHANNEL, -2)
    assert of_channels.fits((7, 7))  # of nothing
    of_channels.update(torch.ones(2, 3, 5))
    fitting = [shape for shape in ((9, 3, 5), (9, 4, 5), (3,), ()) if of_channels.fits(shape)]
    assert fitting == [(9, 3, 5)]
    of_all = Accumulator((Statistic.MEAN,), Scope.ALL)
    of_all.update(torch.ones(2, 3, 5))
    assert of_all.fits((1,))


def _refused(action: Callable[[], object]) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        action()
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    return caught.value


def test_statistics_per_sample_have_no_state() -> None:
    _refused(Accumulator([Statistic.MEAN], Scope.SAMPLE).state)
    state = Accumulator([Statistic.MEAN]).state()
    _refused(lambda: Accumulator.from_state([Statistic.MEAN], Scope.SAMPLE, None, GRID, state))


@pytest.mark.parametrize(
    "other",
    [
        ((Statistic.MEAN,), Scope.ALL, None, StatisticParameters()),
        (REQUESTS[0][0], Scope.ALL, 1, GRID),
        (REQUESTS[0][0], Scope.ALL, None, StatisticParameters(quantiles=QUANTILES, bin_count=8)),
        (REQUESTS[0][0], Scope.ALL, None, StatisticParameters(quantiles=(0.5,), bin_count=7)),
    ],
)
def test_a_state_for_another_request_is_refused(other: Request) -> None:
    state = Accumulator(*REQUESTS[0]).state()
    assert "other statistics" in _refused(lambda: Accumulator.from_state(*other, state)).message


@pytest.mark.parametrize("state", [b"", b"\x00" * 8, b"\xff" * 100, b"{}", bytes(1000)])
def test_bytes_that_are_no_state_are_refused(state: bytes) -> None:
    _refused(lambda: Accumulator.from_state(*REQUESTS[0], state))


@pytest.mark.usefixtures("_small_sketch")
@pytest.mark.parametrize("request_", REQUESTS)
@pytest.mark.parametrize("mutate", ["bytes", "tensors"])
def test_a_mutated_state_is_refused_or_harmless(request_: Request, mutate: str) -> None:
    """20,000 in all. What is taken must also go on: another batch, a result, a state."""
    accumulator = Accumulator(*request_)
    for batch in batches():
        accumulator.update(batch)
    state, generator = accumulator.state(), np.random.default_rng(0)
    mutation = _mutated_bytes if mutate == "bytes" else _mutated_tensors
    taken = 0
    for _ in range(MUTATIONS // 4):
        hostile = mutation(state, generator)
        try:
            resumed = Accumulator.from_state(*request_, hostile)
            resumed.update(torch.ones(2, 3, 5))
            resumed.result()
            assert len(resumed.state()) < 10 * len(state)
            taken += 1
        except ServiceError:
            continue
    assert 0 < taken < MUTATIONS // 4


def _mutated_bytes(state: bytes, generator: np.random.Generator) -> bytes:
    """Overwrite, cut out, repeat or append some bytes anywhere, mostly in the header."""
    data = bytearray(state)
    for _ in range(generator.integers(1, 4)):
        start = int(generator.integers(0, len(data) if generator.random() < 0.5 else min(len(data), 1500)))
        end = start + int(generator.integers(1, 9))
        match generator.integers(0, 5):
            case 0:
                data[start:end] = generator.bytes(end - start)
            case 1:
                del data[start:end]
            case 2:
                data[start:start] = data[start:end]
            case 3:
                data[start] ^= 1 << int(generator.integers(0, 8))
            case _:
                data += generator.bytes(end - start)
        if not data:
            break
    return bytes(data)


EXTREMES = (0, -1, 1, 2, 7, 2**31, 2**53, 2**62, -(2**63))


def _mutated_tensors(state: bytes, generator: np.random.Generator) -> bytes:
    """Change numbers, shapes, dtypes or names of some tensors and write a sound file again."""
    tensors = load(state)
    for _ in range(generator.integers(1, 3)):
        name = str(generator.choice([name for name in tensors if name != "request"]))
        tensor = tensors[name].clone()
        match generator.integers(0, 7):
            case 0:
                del tensors[name]
                continue
            case 1:
                tensor = tensor.to(
                    _choice(generator, [torch.float32, torch.int64, torch.float64, torch.bfloat16])
                )
            case 2:
                tensor = tensor.reshape(
                    _choice(generator, [(-1,), (1, -1), (-1, 1)]) if tensor.numel() else (0,)
                )
            case 3:
                tensor = torch.cat([tensor, tensor], dim=-1) if tensor.ndim else tensor
            case 4:
                tensor = tensor[..., :-1].contiguous() if tensor.ndim else tensor
            case 5 if tensor.is_floating_point() and tensor.numel():
                values = [np.nan, np.inf, -np.inf, -1.0, 3e38, -3e38, 1e-45, 0.5]
                tensor.view(-1)[int(generator.integers(0, tensor.numel()))] = _choice(generator, values)
            case _ if tensor.numel() and tensor.dtype == torch.int64:
                tensor.view(-1)[int(generator.integers(0, tensor.numel()))] = _choice(generator, EXTREMES)
        tensors[name] = tensor
        if generator.random() < 0.05:
            tensors[name + "x"] = tensor.clone()
    return _saved(tensors)


DTYPES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}


def _saved(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Write a sound file; `safetensors.torch.save` takes ten times as long for many small tensors."""
    header: dict[str, object] = {}
    data = b""
    for name, tensor in tensors.items():
        start = len(data)
        data += tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        place = {"shape": list(tensor.shape), "data_offsets": [start, len(data)]}
        header[name] = {"dtype": DTYPES[tensor.dtype], **place}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def _choice(generator: np.random.Generator, options: Sequence[T]) -> T:
    return options[int(generator.integers(0, len(options)))]
