"""Passes of the analyses, with asyncio; `tools/generate_sync.py` generates the sync ones.

The mathematics is in `trocar._analysis`, which knows no client.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trocar._analysis import pca as pca_math
from trocar._analysis.analysis_inputs import Samples, batches_of, unwrapped
from trocar._analysis.analysis_taps import (
    channel_taps,
    names_of,
    one_tap,
    overall_taps,
    pooled,
    value_taps,
    with_channels,
)
from trocar._analysis.dead_channels import DEAD_STATISTICS, check_threshold, dead_channels_of
from trocar._analysis.diff import check_tolerance
from trocar._analysis.diff_collector import DiffCollector
from trocar._analysis.fid import fid_of
from trocar._analysis.health_rows import health_of
from trocar._analysis.health_taps import (
    gradient_taps,
    gradients_of_parameters,
    norms_of_parameters,
    owners_of,
    taps_of_parameters,
)
from trocar._analysis.moments import MOMENT_STATISTICS, moments
from trocar._analysis.ordering import EVERYTHING, in_execution_order
from trocar._analysis.similarity.cka import Cka, FeatureCollector, alignment
from trocar._base.call_options import EXACT
from trocar._base.concurrency import AsyncItems, AsyncLock, async_compute
from trocar._request.nested_inputs import copied
from trocar._request.taps import tap
from trocar.errors import (
    BadReplyError,
    InvalidRequestError,
    NotDifferentiableError,
    NotFoundError,
    SelectorError,
    TrocarError,
    UnknownParameterError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any, Self

    from trocar._analysis.analysis_inputs import AsyncBatches, AsyncInputSet
    from trocar._analysis.analysis_taps import Taps
    from trocar._analysis.dead_channels import DeadChannels
    from trocar._analysis.diff import Diff
    from trocar._analysis.fid import Fid
    from trocar._analysis.health import Health, HealthThresholds
    from trocar._analysis.moments import Moments
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.gradients import AsyncGradients
    from trocar._async.stream import AsyncExtractStream
    from trocar._request.edits import Edits
    from trocar._request.inputs import Inputs
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMapInfo, FeatureMaps
    from trocar._result.statistics import Statistics


async def fid(
    extraction: AsyncExtraction,
    model_id: str,
    sets: tuple[AsyncInputSet, AsyncInputSet],
    at: str | Tap,
    batch_size: int,
) -> Fid:
    """Passes of `AsyncAnalyses.fid`."""
    where = one_tap(at)
    named = {
        name: batches_of(images, batch_size)
        for name, images in zip(("images_a", "images_b"), sets, strict=True)
    }
    for name, batches in named.items():
        if isinstance(batches, Samples) and batches.count < 2:
            raise ValueError(f"{name}: a covariance needs at least 2 samples, received {batches.count}")
    where = await averaged(extraction, model_id, where)
    a, b = [await _moments(extraction, model_id, batches, where, name) for name, batches in named.items()]
    return await async_compute(fid_of, a, b, where.selector)


async def fit_pca(
    extraction: AsyncExtraction, model_id: str, inputs: AsyncInputSet, at: str | Tap, k: int, batch_size: int
) -> pca_math.Pca:
    """Passes of `AsyncAnalyses.fit_pca`."""
    count, where = pca_math.check_component_count(k), one_tap(at)
    outcome = await _moments(extraction, model_id, batches_of(inputs, batch_size), where, "inputs")
    return await async_compute(pca_math.fit, outcome, count, where.selector, model_id)


async def dead_channels(
    extraction: AsyncExtraction,
    model_id: str,
    inputs: AsyncInputSet,
    taps: Taps,
    threshold: float,
    batch_size: int,
) -> DeadChannels:
    """Passes of `AsyncAnalyses.dead_channels`."""
    limit, chosen = check_threshold(threshold), channel_taps(taps, DEAD_STATISTICS)
    batches = batches_of(inputs, batch_size)
    plan = await extraction.plan(model_id, None, overall_taps(chosen))
    chosen = with_channels(chosen, plan)
    statistics, info = await _running_statistics(extraction, model_id, batches, chosen, "inputs")
    return dead_channels_of(statistics, info, limit, model_id)


async def cka(
    extraction: AsyncExtraction,
    models: tuple[str, str],
    inputs: AsyncInputSet,
    taps: tuple[Taps, Taps | None],
    batch_size: int,
    debiased: bool,
) -> Cka:
    """Passes of `AsyncAnalyses.cka`; the second of `models` and of `taps` is for the columns."""
    with FeatureCollector() as left, FeatureCollector() as right:
        names = await collect(extraction, models, inputs, taps, batch_size, (left, right))
        rows = await async_compute(left.aligned, debiased)
        columns = rows if models[0] == models[1] else await async_compute(right.aligned, debiased)
        matrix = alignment([rows[name] for name in names[0]], [columns[name] for name in names[1]])
        return Cka(matrix, names[0], names[1], *models, left.count, debiased)


async def collect(
    extraction: AsyncExtraction,
    models: tuple[str, str],
    inputs: AsyncInputSet,
    taps: tuple[Taps, Taps | None],
    batch_size: int,
    sides: tuple[FeatureCollector, FeatureCollector],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Collect the features of rows and columns, and return the names of both.

    The first collector has both where the models are the same.
    """
    of_rows = value_taps(taps[0])
    of_columns = of_rows if taps[1] is None else value_taps(taps[1])
    batches = batches_of(inputs, batch_size)
    names: list[tuple[str, ...]] = [(), ()]
    left, right = sides

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
        await _alone(extraction, models[0], batches, both, add)
    else:
        await side_by_side(extraction, models, batches, (of_rows, of_columns), add)
    return names[0], names[1]


async def diff(
    extraction: AsyncExtraction,
    models: tuple[str, str],
    inputs: AsyncInputSet,
    taps: tuple[Taps, Taps | Mapping[str, str | Tap] | None],
    edits: tuple[Edits, Edits],
    tolerance: float,
    batch_size: int,
) -> Diff:
    """Passes of `AsyncAnalyses.diff`."""
    limit, collector = check_tolerance(tolerance), DiffCollector(*taps)
    batches = batches_of(inputs, batch_size)
    both_taps = (collector.taps_a, collector.taps_b)
    await side_by_side(extraction, models, batches, both_taps, collector.add, edits)
    order = await executed(extraction, models[0]) if collector.needs_order else []
    return collector.result(*models, limit, order)


async def health(
    extraction: AsyncExtraction,
    gradients: AsyncGradients,
    model_id: str,
    inputs: Inputs,
    at: Taps,
    thresholds: HealthThresholds,
    **options: Any,
) -> Health:
    """Pass of `AsyncAnalyses.health`; `options` are passed to `gradients`."""
    taps = gradient_taps(at)
    owners = [owner for owner in owners_of(taps) if await _has_own(extraction, model_id, owner)]
    maps = None
    while maps is None:
        try:
            maps = await gradients.gradients(
                model_id, inputs, at=taps, taps=taps_of_parameters(owners), **options
            )
        except (UnknownParameterError, NotDifferentiableError) as error:  # nothing was computed
            owners = _without(owners, error)
    names = await _ordered(extraction, model_id, taps, maps) if len(taps) > 1 else None
    return health_of(maps, taps, owners, thresholds, names)


async def _moments(
    extraction: AsyncExtraction, model_id: str, batches: AsyncBatches, where: Tap, inputs: str
) -> Moments:
    taps = channel_taps(where, MOMENT_STATISTICS)
    statistics, info = await _running_statistics(extraction, model_id, batches, taps, inputs)
    return moments(statistics, info, where.selector, inputs)


async def averaged(extraction: AsyncExtraction, model_id: str, where: Tap) -> Tap:
    """Average the positions, if there are any after the caller's own reductions."""
    plan = await extraction.plan(model_id, None, where)
    return pooled(where) if any(len(entry.shape) > 2 for entry in plan.feature_maps.values()) else where


async def _running_statistics(
    extraction: AsyncExtraction, model_id: str, batches: AsyncBatches, taps: Sequence[Tap], inputs: str
) -> tuple[Mapping[str, Statistics], Mapping[str, FeatureMapInfo]]:
    """Return the statistics over all batches, and metadata of the feature maps."""
    info: dict[str, FeatureMapInfo] = {}
    async with extraction.extract_stream(model_id, batches, taps, running_statistics=True) as stream:
        async for result in stream:
            info.update(unwrapped(result, batches, model_id).info)
        if not info:
            raise ValueError(f"{inputs}: no batches; pass at least one")
        return stream.statistics, info


async def executed(
    extraction: AsyncExtraction, model_id: str, inputs: Inputs | None = None
) -> Sequence[FeatureMapInfo]:
    """Return the outputs of every call of a pass, in execution order; none if there is no such order.

    Args:
        extraction: Plans the pass.
        model_id: The model.
        inputs: The pass's inputs; one example input when None.
    """
    everything = tap(EVERYTHING, stats=["absmax"], values=False)  # without values no limit applies
    try:
        plan = await extraction.plan(model_id, inputs, everything)
    except (InvalidRequestError, NotFoundError):  # a model that is a single module, for example
        return ()
    return tuple(plan.feature_maps.values())


async def _alone(
    extraction: AsyncExtraction,
    model_id: str,
    batches: AsyncBatches,
    taps: Sequence[Tap],
    add: Callable[[FeatureMaps, FeatureMaps], None],
) -> None:
    """Run one model and pass the result of each batch to `add`, for both sides."""
    async with extraction.extract_stream(model_id, batches, taps) as stream:
        async for result in stream:
            maps = unwrapped(result, batches, model_id)
            await async_compute(add, maps, maps)


async def side_by_side(
    extraction: AsyncExtraction,
    models: tuple[str, str],
    batches: AsyncBatches,
    taps: tuple[Sequence[Tap], Sequence[Tap]],
    add: Callable[[FeatureMaps, FeatureMaps], None],
    edits: tuple[Edits, Edits] = ((), ()),
) -> None:
    """Run two models on the same batches and pass the results of each batch to `add`.

    Exactly: passes with edits always are, and differences would be those of the numerics.
    """
    shared = _AsyncShared(batches)
    async with (
        extraction.extract_stream(
            models[0], shared.branch(0), taps[0], edits=edits[0], options=EXACT
        ) as stream_a,
        extraction.extract_stream(
            models[1], shared.branch(1), taps[1], edits=edits[1], options=EXACT
        ) as stream_b,
    ):
        while (maps_a := await _next(stream_a, batches, models[0])) is not None:
            maps_b = await _next(stream_b, batches, models[1])
            if maps_b is None:
                raise BadReplyError(f"the stream of {models[1]} ended before that of {models[0]}")
            await async_compute(add, maps_a, maps_b)


async def _next(stream: AsyncExtractStream, batches: AsyncBatches, model_id: str) -> FeatureMaps | None:
    """Return the result of the next batch; None at the end."""
    try:
        result = await anext(stream)
    except StopAsyncIteration:
        return None
    except TrocarError as error:
        error.add_note(f"of {model_id}")
        raise
    return unwrapped(result, batches, model_id)


class _AsyncShared:
    """The items of one iterable for two readers, buffered until both have read them.

    The buffer is bounded by the window of a stream, as the readers' results are read in step.
    """

    def __init__(self, batches: AsyncBatches) -> None:
        self._source: AsyncItems[Inputs] = AsyncItems(batches)
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
        item = copied(item)  # one reader may come after the next item, which may be in the same buffer
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


async def _has_own(extraction: AsyncExtraction, model_id: str, owner: str) -> bool:
    """Whether modules have parameters or buffers of their own."""
    try:
        await extraction.plan(model_id, None, norms_of_parameters(owner))
    except (SelectorError, NotFoundError):  # the pass will report an error of the selector itself
        return False
    return True


def _without(owners: Sequence[str], error: TrocarError) -> list[str]:
    """Return the owners without the one that the error names.

    It has buffers alone, or its parameters have no gradient.

    Raises:
        TrocarError: It is about none of them.
    """
    selector, name = error.details.get("selector"), error.details.get("name", "")
    kept = [
        owner
        for owner in owners
        if gradients_of_parameters(owner).selector != selector and not name.startswith(f"{owner}/param_grad(")
    ]
    if len(kept) == len(owners):
        raise error
    return kept


async def _ordered(
    extraction: AsyncExtraction, model_id: str, taps: Sequence[Tap], maps: FeatureMaps
) -> Sequence[str]:
    names = names_of(taps, maps.info, maps.expansions)
    return in_execution_order(names, maps.info, await executed(extraction, model_id))
