"""The passes behind the analyses for asyncio; `tools/generate_sync.py` makes the sync ones of them.

The mathematics is in `trocar._analysis`, which knows no client.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trocar._analysis import pca as pca_math
from trocar._analysis.cka import Cka, FeatureCollector, alignment
from trocar._analysis.comparison import DiffCollector
from trocar._analysis.dead_channels import DEAD_STATISTICS, check_threshold, dead_channels_of
from trocar._analysis.diff import check_tolerance
from trocar._analysis.fid import fid_of
from trocar._analysis.inputs import Samples, batches_of, unwrapped
from trocar._analysis.moments import MOMENT_STATISTICS, moments
from trocar._analysis.ordering import EVERYTHING
from trocar._analysis.taps import (
    channel_taps,
    names_of,
    one_tap,
    overall_taps,
    pooled,
    value_taps,
    with_channels,
)
from trocar._concurrency import AsyncLock, AsyncSource, async_compute
from trocar._taps import tap
from trocar.errors import BadReplyError, InvalidRequestError, NotFoundError, TrocarError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from trocar._aio_extraction import AsyncExtraction
    from trocar._aio_stream import AsyncExtractStream
    from trocar._analysis.dead_channels import DeadChannels
    from trocar._analysis.diff import Diff
    from trocar._analysis.fid import Fid
    from trocar._analysis.inputs import AsyncBatches, AsyncInputSet
    from trocar._analysis.moments import Moments
    from trocar._analysis.taps import Taps
    from trocar._feature_maps import FeatureMapInfo, FeatureMaps
    from trocar._inputs import Inputs
    from trocar._statistics import Statistics
    from trocar._taps import Tap


async def fid(
    client: AsyncExtraction,
    model_id: str,
    sets: tuple[AsyncInputSet, AsyncInputSet],
    at: str | Tap,
    batch_size: int,
) -> Fid:
    """Do the work of `AsyncExtraction.fid`."""
    where = one_tap(at)
    named = {
        name: batches_of(images, batch_size)
        for name, images in zip(("images_a", "images_b"), sets, strict=True)
    }
    for name, batches in named.items():
        if isinstance(batches, Samples) and batches.count < 2:
            raise ValueError(f"{name}: a covariance needs at least 2 samples, there is {batches.count}")
    where = await _pooled(client, model_id, where)
    a, b = [await _moments(client, model_id, batches, where, name) for name, batches in named.items()]
    return await async_compute(fid_of, a, b, where.selector)


async def fit_pca(
    client: AsyncExtraction, model_id: str, inputs: AsyncInputSet, at: str | Tap, k: int, batch_size: int
) -> pca_math.Pca:
    """Do the work of `AsyncExtraction.fit_pca`."""
    count, where = pca_math.check_component_count(k), one_tap(at)
    found = await _moments(client, model_id, batches_of(inputs, batch_size), where, "inputs")
    return await async_compute(pca_math.fit, found, count, where.selector, model_id)


async def dead_channels(
    client: AsyncExtraction,
    model_id: str,
    inputs: AsyncInputSet,
    taps: Taps,
    threshold: float,
    batch_size: int,
) -> DeadChannels:
    """Do the work of `AsyncExtraction.dead_channels`."""
    limit, chosen = check_threshold(threshold), channel_taps(taps, DEAD_STATISTICS)
    batches = batches_of(inputs, batch_size)
    plan = await client.plan(model_id, None, overall_taps(chosen))
    chosen = with_channels(chosen, plan)
    statistics, info = await _running_statistics(client, model_id, batches, chosen, "inputs")
    return dead_channels_of(statistics, info, limit, model_id)


async def cka(
    client: AsyncExtraction,
    models: tuple[str, str],
    inputs: AsyncInputSet,
    taps: tuple[Taps, Taps | None],
    batch_size: int,
    debiased: bool,
) -> Cka:
    """Do the work of `AsyncExtraction.cka`; the second of `models` and of `taps` is for the columns."""
    of_rows = value_taps(taps[0])
    of_columns = of_rows if taps[1] is None else value_taps(taps[1])
    batches = batches_of(inputs, batch_size)
    names: list[tuple[str, ...]] = [(), ()]
    with FeatureCollector() as left, FeatureCollector() as right:

        def add(maps_a: FeatureMaps, maps_b: FeatureMaps) -> None:
            names[0] = names_of(of_rows, maps_a.info, maps_a.expansions)
            names[1] = names_of(of_columns, maps_b.info, maps_b.expansions)
            if maps_a is maps_b:
                left.add({name: maps_a[name] for name in dict.fromkeys(names[0] + names[1])})
                return
            left.add({name: maps_a[name] for name in names[0]})
            right.add({name: maps_b[name] for name in names[1]})

        if models[0] == models[1]:
            both = of_rows if of_columns is of_rows else [*of_rows, *of_columns]
            await _alone(client, models[0], batches, both, add)
        else:
            await _side_by_side(client, models, batches, (of_rows, of_columns), add)
        rows = await async_compute(left.aligned, debiased)
        columns = rows if models[0] == models[1] else await async_compute(right.aligned, debiased)
        matrix = alignment([rows[name] for name in names[0]], [columns[name] for name in names[1]])
        return Cka(matrix, names[0], names[1], *models, left.count, debiased)


async def diff(
    client: AsyncExtraction,
    models: tuple[str, str],
    inputs: AsyncInputSet,
    taps: tuple[Taps, Taps | Mapping[str, str | Tap] | None],
    tolerance: float,
    batch_size: int,
) -> Diff:
    """Do the work of `AsyncExtraction.diff`."""
    limit, collector = check_tolerance(tolerance), DiffCollector(*taps)
    batches = batches_of(inputs, batch_size)
    await _side_by_side(client, models, batches, (collector.taps_a, collector.taps_b), collector.add)
    order = await executed(client, models[0]) if collector.needs_order else []
    return collector.result(*models, limit, order)


async def _moments(
    client: AsyncExtraction, model_id: str, batches: AsyncBatches, where: Tap, inputs: str
) -> Moments:
    taps = channel_taps(where, MOMENT_STATISTICS)
    statistics, info = await _running_statistics(client, model_id, batches, taps, inputs)
    return moments(statistics, info, where.selector, inputs)


async def _pooled(client: AsyncExtraction, model_id: str, where: Tap) -> Tap:
    """Average the positions where there are some, or the caller's own reductions leave some."""
    plan = await client.plan(model_id, None, where)
    return pooled(where) if any(len(entry.shape) > 2 for entry in plan.feature_maps.values()) else where


async def _running_statistics(
    client: AsyncExtraction, model_id: str, batches: AsyncBatches, taps: Sequence[Tap], inputs: str
) -> tuple[Mapping[str, Statistics], Mapping[str, FeatureMapInfo]]:
    """Return the statistics over all batches, and what is known of the feature maps."""
    info: dict[str, FeatureMapInfo] = {}
    async with client.extract_stream(model_id, batches, taps, running_statistics=True) as stream:
        async for result in stream:
            info.update(unwrapped(result, batches, model_id).info)
        if not info:
            raise ValueError(f"{inputs}: there is no batch; pass at least one")
        return stream.statistics, info


async def executed(client: AsyncExtraction, model_id: str) -> Sequence[FeatureMapInfo]:
    """Return the outputs of every call of a pass, in execution order; none where there is no such order."""
    everything = tap(EVERYTHING, stats=["absmax"], values=False)  # without values no limit is met
    try:
        plan = await client.plan(model_id, None, everything)
    except (InvalidRequestError, NotFoundError):  # a model that is a single module, for example
        return ()
    return tuple(plan.feature_maps.values())


async def _alone(
    client: AsyncExtraction,
    model_id: str,
    batches: AsyncBatches,
    taps: Sequence[Tap],
    add: Callable[[FeatureMaps, FeatureMaps], None],
) -> None:
    """Run one model and pass what each batch gave to `add`, for both sides."""
    async with client.extract_stream(model_id, batches, taps) as stream:
        async for result in stream:
            maps = unwrapped(result, batches, model_id)
            await async_compute(add, maps, maps)


async def _side_by_side(
    client: AsyncExtraction,
    models: tuple[str, str],
    batches: AsyncBatches,
    taps: tuple[Sequence[Tap], Sequence[Tap]],
    add: Callable[[FeatureMaps, FeatureMaps], None],
) -> None:
    """Run two models on the same batches and pass what each batch gave to `add`."""
    shared = _AsyncShared(batches)
    async with (
        client.extract_stream(models[0], shared.branch(0), taps[0]) as stream_a,
        client.extract_stream(models[1], shared.branch(1), taps[1]) as stream_b,
    ):
        while (maps_a := await _next(stream_a, batches, models[0])) is not None:
            maps_b = await _next(stream_b, batches, models[1])
            if maps_b is None:
                raise BadReplyError(f"the stream of {models[1]} ended before that of {models[0]}")
            await async_compute(add, maps_a, maps_b)


async def _next(stream: AsyncExtractStream, batches: AsyncBatches, model_id: str) -> FeatureMaps | None:
    """Return what the next batch gave; None at the end."""
    try:
        result = await anext(stream)
    except StopAsyncIteration:
        return None
    except TrocarError as error:
        error.add_note(f"of {model_id}")
        raise
    return unwrapped(result, batches, model_id)


class _AsyncShared:
    """The items of one iterable for two readers; what one has not read yet is kept.

    The readers are never further apart than the window of a stream, as their results are read in step.
    """

    def __init__(self, batches: AsyncBatches) -> None:
        self._source: AsyncSource[Inputs] = AsyncSource(batches)
        self._taking = AsyncLock()
        self._waiting: tuple[deque[Inputs], deque[Inputs]] = (deque(), deque())
        self._error: Exception | None = None

    def branch(self, reader: int) -> _AsyncBranch:
        """Return the items for reader 0 or 1."""
        return _AsyncBranch(self, reader)

    async def next(self, reader: int) -> Inputs:
        """Return a reader's next item.

        Raises:
            StopAsyncIteration: There is none.
        """
        async with self._taking:
            if not self._waiting[reader]:
                await self._take()
            return self._waiting[reader].popleft()

    async def _take(self) -> None:
        if self._error is not None:  # for both readers: an iterator that has failed would just end
            raise self._error
        try:
            item = await self._source.next()
        except Exception as error:
            self._error = error
            raise
        for waiting in self._waiting:
            waiting.append(item)


class _AsyncBranch:
    """One reader's items."""

    def __init__(self, shared: _AsyncShared, reader: int) -> None:
        self._shared = shared
        self._reader = reader

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Inputs:
        return await self._shared.next(self._reader)
