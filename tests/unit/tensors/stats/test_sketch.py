"""Quantiles, against `numpy.quantile` as long as all elements are held, and then against true ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.unit.tensors.stats.oracle import Array, groups, numpy_quantiles, tensor
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats import Accumulator, Scope, Statistic, StatisticParameters, reduce, sketch

SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.999, 1.0)
PARAMETERS = StatisticParameters(quantiles=SHARES)
FINITE = st.floats(-1e100, 1e100) | st.integers(-2, 2).map(float)
SHAPES = hnp.array_shapes(min_dims=2, max_dims=4, max_side=5)


def fed(pieces: list[Array], scope: Scope = Scope.ALL, shares: tuple[float, ...] = SHARES) -> Accumulator:
    accumulator = Accumulator([Statistic.QUANTILES], scope, 1, StatisticParameters(quantiles=shares))
    for piece in pieces:
        accumulator.update(tensor(piece))
    return accumulator


def quantiles(accumulator: Accumulator, count: int = len(SHARES)) -> Array:
    return np.array(accumulator.result().values[Statistic.QUANTILES]).reshape(-1, count)


def split(values: Array, data: st.DataObject) -> list[Array]:
    return np.split(values, data.draw(st.lists(st.integers(0, len(values)), max_size=3).map(sorted)))


@given(values=hnp.arrays(np.float64, SHAPES, elements=FINITE), scope=st.sampled_from(Scope), data=st.data())
def test_few_elements_give_what_numpy_gives_bit_for_bit(
    values: Array, scope: Scope, data: st.DataObject
) -> None:
    accumulator = fed(split(values, data), scope)
    wanted = [numpy_quantiles(part, SHARES) for part in groups(values, scope, 1)]
    np.testing.assert_array_equal(quantiles(accumulator), wanted)
    assert accumulator.result().rank_error == 0.0


@given(
    values=hnp.arrays(np.float64, (3, 4, 2), elements=FINITE | st.just(np.nan)), scope=st.sampled_from(Scope)
)
def test_nan_makes_nan_of_its_own_group(values: Array, scope: Scope) -> None:
    wanted = [numpy_quantiles(part, SHARES) for part in groups(values, scope, 1)]
    np.testing.assert_array_equal(quantiles(fed(list(values[:, None]), scope)), wanted)


@given(values=hnp.arrays(np.float64, 5, elements=st.sampled_from([-np.inf, -1.0, 2.0, np.inf])))
def test_infinities_are_elements_like_others(values: Array) -> None:
    shares = (0.0, 0.25, 0.5, 0.75, 1.0)  # of five elements, each is one
    found = quantiles(fed([values], shares=shares), len(shares))
    np.testing.assert_array_equal(found, [numpy_quantiles(values, shares)])


@pytest.mark.parametrize(
    ("values", "share", "wanted"),
    [([np.inf, np.inf], 0.3, np.inf), ([1.0, np.inf], 0.25, np.inf), ([-np.inf, np.inf], 0.5, np.nan)],
)
def test_between_infinities(values: list[float], share: float, wanted: float) -> None:
    found = quantiles(fed([np.array(values)], shares=(share,)), 1)
    np.testing.assert_array_equal(found, [[wanted]])


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16])
def test_every_real_dtype_is_interpolated_in_float64(dtype: torch.dtype, scope: Scope) -> None:
    value = (torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0)) * 9).abs().to(dtype)
    found = reduce(value, [Statistic.QUANTILES], scope, 1, PARAMETERS).values[Statistic.QUANTILES]
    wanted = [numpy_quantiles(part, SHARES) for part in groups(value.double().numpy(), scope, 1)]
    np.testing.assert_array_equal(np.reshape(found, (-1, len(SHARES))), wanted)


def test_integers_that_float32_rounds_are_told_apart() -> None:
    value = torch.tensor([2**24, 2**24 + 1, 2**24 + 3])
    found = reduce(value, [Statistic.QUANTILES], Scope.ALL, parameters=PARAMETERS)
    assert found.values[Statistic.QUANTILES][3] == 2**24 + 1


@pytest.mark.parametrize("scope", Scope)
@pytest.mark.parametrize("shape", [(0, 3), (2, 3, 0)])
def test_of_no_elements_there_are_no_quantiles(shape: tuple[int, ...], scope: Scope) -> None:
    found = quantiles(fed([np.empty(shape)], scope))
    assert found.shape == (len(groups(np.empty(shape), scope, 1)), len(SHARES))
    assert np.isnan(found).all()


def test_a_held_tensor_may_change_later() -> None:
    value = torch.zeros(4, 3)
    accumulator = Accumulator([Statistic.QUANTILES], parameters=PARAMETERS)
    accumulator.update(value)
    value.fill_(9.0)
    assert accumulator.result().values[Statistic.QUANTILES] == [0.0] * len(SHARES)


# From here on more elements than are held.


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketch, "HELD_ELEMENTS", 4096)
    monkeypatch.setattr(sketch, "MIN_CAPACITY", 64)


def rank_distance(values: Array, found: Array, shares: tuple[float, ...]) -> float:
    """Return by how many elements a quantile misses its place among the sorted elements, at most.

    A value among equal ones, or between two neighbours, is at each of their places.
    """
    ordered = np.sort(values)
    place = np.array(shares) * (len(ordered) - 1)
    first = np.searchsorted(ordered, found, side="left") - 1.0
    last = np.searchsorted(ordered, found, side="right").astype(float)
    return float(np.max(np.maximum(first - place, place - last), initial=0.0))


def adversarial(kind: str, size: int) -> Array:
    generator = np.random.default_rng(7)
    values = generator.normal(size=size)
    match kind:
        case "sorted":
            return np.sort(values)
        case "reversed":
            return np.sort(values)[::-1].copy()
        case "few values":
            return np.round(values)
        case "offset":
            return values * 1e-3 + 1e8
        case "infinite":
            values[generator.random(size) < 0.3] = np.inf
            values[generator.random(size) < 0.3] = -np.inf
            return values
        case "zigzag":
            return np.ravel(np.column_stack([np.arange(size // 2), -np.arange(size // 2)])).astype(float)
    return values


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    "kind", ["random", "sorted", "reversed", "few values", "offset", "infinite", "zigzag"]
)
@pytest.mark.parametrize("batch", [1, 37, 5000, 100_000])
def test_ranks_are_never_farther_off_than_told(kind: str, batch: int) -> None:
    values = adversarial(kind, 100_000 if batch > 1 else 6_000)
    shares = tuple(np.linspace(0.0, 1.0, 401).tolist())
    accumulator = fed(np.split(values, range(batch, len(values), batch)), shares=shares)
    found, told = quantiles(accumulator, 401)[0], accumulator.result().rank_error
    assert 0.0 < told < 0.005
    is_told = ~np.isnan(found)  # between two infinities there is no number
    distance = rank_distance(values, found[is_told], tuple(np.array(shares)[is_told]))
    assert distance <= told * len(values)
    assert found[[0, -1]].tolist() == [values.min(), values.max()]


@pytest.mark.usefixtures("_small")
@given(sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=12), data=st.data())
def test_merging_in_any_order_keeps_the_promise(sizes: list[int], data: st.DataObject) -> None:
    generator = np.random.default_rng(3)
    pieces = [generator.normal(data.draw(st.integers(-3, 3)), size=(2, 2, size)) for size in sizes]
    accumulators = [fed([piece], Scope.CHANNEL) for piece in pieces]
    while len(accumulators) > 1:
        other = accumulators.pop(data.draw(st.integers(0, len(accumulators) - 1)))
        accumulators[data.draw(st.integers(0, len(accumulators) - 1))].merge(other)
    values = np.concatenate(pieces, axis=2)
    told = accumulators[0].result().rank_error
    for part, found in zip(groups(values, Scope.CHANNEL, 1), quantiles(accumulators[0]), strict=True):
        assert rank_distance(part, found, SHARES) <= told * len(part)
    assert (told == 0.0) == (values.size <= sketch.HELD_ELEMENTS)


@pytest.mark.usefixtures("_small")
def test_memory_does_not_grow_with_the_elements() -> None:
    known = sketch.nothing(4, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        known = known.merge(sketch.measure(torch.randn(4, 999, generator=generator), 0))
        held = [*known.raw, *(buffer.values for buffer in known.buffers)]
        assert sum(piece.numel() for piece in held) <= sketch.HELD_ELEMENTS
        # No piece may keep a larger one alive.
        assert sum(piece.untyped_storage().nbytes() for piece in held) <= 4 * sketch.HELD_ELEMENTS


@pytest.mark.usefixtures("_small")
def test_a_sample_of_any_size_has_its_own_bound() -> None:
    values = np.random.default_rng(0).normal(size=(3, 20_000))
    accumulator = fed([values[:1], values[1:]], Scope.SAMPLE)
    told = accumulator.result().rank_error
    assert 0.0 < told < 0.005
    for row, found in zip(values, quantiles(accumulator), strict=True):
        assert rank_distance(row, found, SHARES) <= told * len(row)


@pytest.mark.usefixtures("_small")
def test_small_samples_are_exact_however_many() -> None:
    values = np.random.default_rng(0).normal(size=(300, 1000))
    accumulator = fed([values], Scope.SAMPLE)
    np.testing.assert_array_equal(quantiles(accumulator), np.quantile(values, SHARES, axis=1).T)
    assert accumulator.result().rank_error == 0.0


@pytest.mark.usefixtures("_small")
def test_too_many_groups_are_refused_and_leave_no_trace() -> None:
    accumulator = Accumulator([Statistic.QUANTILES], Scope.CHANNEL, 1, PARAMETERS)
    accumulator.update(torch.zeros(10, 65))
    with pytest.raises(ServiceError, match="65 channels") as caught:
        accumulator.update(torch.ones(100, 65))
    assert caught.value.reason is ErrorReason.REDUCTION_REJECTED
    assert set(accumulator.result().values[Statistic.QUANTILES]) == {0.0}


def test_a_hundred_million_elements_are_within_half_a_percent_by_far() -> None:
    """A permutation of 0 to n - 1, so that every element is its own rank."""
    size, step = 100_000_000, 1 << 22
    shares = tuple(np.linspace(0.0, 1.0, 101).tolist())
    accumulator = Accumulator([Statistic.QUANTILES], parameters=StatisticParameters(quantiles=shares))
    for start in range(0, size, step):
        index = torch.arange(start, min(start + step, size))
        accumulator.update((index * 61_803_399) % size)
    result = accumulator.result()
    off = np.abs(np.array(result.values[Statistic.QUANTILES]) - np.array(shares) * (size - 1))
    assert 0.0 < result.rank_error < 1e-5
    assert off.max() <= result.rank_error * size


@pytest.mark.cuda
def test_a_cuda_tensor_gives_what_a_cpu_gives() -> None:
    value = torch.randn(8, 16, 200, 200)
    results = [
        reduce(value.to(device), [Statistic.QUANTILES, Statistic.HISTOGRAM], Scope.CHANNEL, 1, PARAMETERS)
        for device in ("cpu", "cuda")
    ]
    assert results[0] == results[1]
