"""Part of the sync client: generated from _aio_analysis.py by tools/generate_sync.py, do not edit."""

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
from trocar._concurrency import SyncLock, SyncSource, sync_compute
from trocar._taps import tap
from trocar.errors import BadReplyError, InvalidRequestError, NotFoundError, TrocarError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from trocar._analysis.dead_channels import DeadChannels
    from trocar._analysis.diff import Diff
    from trocar._analysis.fid import Fid
    from trocar._analysis.inputs import Batches, InputSet
    from trocar._analysis.moments import Moments
    from trocar._analysis.taps import Taps
    from trocar._client_extraction import Extraction
    from trocar._client_stream import ExtractStream
    from trocar._feature_maps import FeatureMapInfo, FeatureMaps
    from trocar._inputs import Inputs
    from trocar._statistics import Statistics
    from trocar._taps import Tap


def fid(
    client: Extraction,
    model_id: str,
    sets: tuple[InputSet, InputSet],
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
    where = _pooled(client, model_id, where)
    a, b = [_moments(client, model_id, batches, where, name) for name, batches in named.items()]
    return sync_compute(fid_of, a, b, where.selector)


def fit_pca(
    client: Extraction, model_id: str, inputs: InputSet, at: str | Tap, k: int, batch_size: int
) -> pca_math.Pca:
    """Do the work of `AsyncExtraction.fit_pca`."""
    count, where = pca_math.check_component_count(k), one_tap(at)
    found = _moments(client, model_id, batches_of(inputs, batch_size), where, "inputs")
    return sync_compute(pca_math.fit, found, count, where.selector, model_id)


def dead_channels(
    client: Extraction,
    model_id: str,
    inputs: InputSet,
    taps: Taps,
    threshold: float,
    batch_size: int,
) -> DeadChannels:
    """Do the work of `AsyncExtraction.dead_channels`."""
    limit, chosen = check_threshold(threshold), channel_taps(taps, DEAD_STATISTICS)
    batches = batches_of(inputs, batch_size)
    plan = client.plan(model_id, None, overall_taps(chosen))
    chosen = with_channels(chosen, plan)
    statistics, info = _running_statistics(client, model_id, batches, chosen, "inputs")
    return dead_channels_of(statistics, info, limit, model_id)


def cka(
    client: Extraction,
    models: tuple[str, str],
    inputs: InputSet,
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
            _alone(client, models[0], batches, both, add)
        else:
            _side_by_side(client, models, batches, (of_rows, of_columns), add)
        rows = sync_compute(left.aligned, debiased)
        columns = rows if models[0] == models[1] else sync_compute(right.aligned, debiased)
        matrix = alignment([rows[name] for name in names[0]], [columns[name] for name in names[1]])
        return Cka(matrix, names[0], names[1], *models, left.count, debiased)


def diff(
    client: Extraction,
    models: tuple[str, str],
    inputs: InputSet,
    taps: tuple[Taps, Taps | Mapping[str, str | Tap] | None],
    tolerance: float,
    batch_size: int,
) -> Diff:
    """Do the work of `AsyncExtraction.diff`."""
    limit, collector = check_tolerance(tolerance), DiffCollector(*taps)
    batches = batches_of(inputs, batch_size)
    _side_by_side(client, models, batches, (collector.taps_a, collector.taps_b), collector.add)
    order = executed(client, models[0]) if collector.needs_order else []
    return collector.result(*models, limit, order)


def _moments(client: Extraction, model_id: str, batches: Batches, where: Tap, inputs: str) -> Moments:
    taps = channel_taps(where, MOMENT_STATISTICS)
    statistics, info = _running_statistics(client, model_id, batches, taps, inputs)
    return moments(statistics, info, where.selector, inputs)


def _pooled(client: Extraction, model_id: str, where: Tap) -> Tap:
    """Average the positions where there are some, or the caller's own reductions leave some."""
    plan = client.plan(model_id, None, where)
    return pooled(where) if any(len(entry.shape) > 2 for entry in plan.feature_maps.values()) else where


def _running_statistics(
    client: Extraction, model_id: str, batches: Batches, taps: Sequence[Tap], inputs: str
) -> tuple[Mapping[str, Statistics], Mapping[str, FeatureMapInfo]]:
    """Return the statistics over all batches, and what is known of the feature maps."""
    info: dict[str, FeatureMapInfo] = {}
    with client.extract_stream(model_id, batches, taps, running_statistics=True) as stream:
        for result in stream:
            info.update(unwrapped(result, batches, model_id).info)
        if not info:
            raise ValueError(f"{inputs}: there is no batch; pass at least one")
        return stream.statistics, info


def executed(client: Extraction, model_id: str) -> Sequence[FeatureMapInfo]:
    """Return the outputs of every call of a pass, in execution order; none where there is no such order."""
    everything = tap(EVERYTHING, stats=["absmax"], values=False)  # without values no limit is met
    try:
        plan = client.plan(model_id, None, everything)
    except (InvalidRequestError, NotFoundError):  # a model that is a single module, for example
        return ()
    return tuple(plan.feature_maps.values())


def _alone(
    client: Extraction,
    model_id: str,
    batches: Batches,
    taps: Sequence[Tap],
    add: Callable[[FeatureMaps, FeatureMaps], None],
) -> None:
    """Run one model and pass what each batch gave to `add`, for both sides."""
    with client.extract_stream(model_id, batches, taps) as stream:
        for result in stream:
            maps = unwrapped(result, batches, model_id)
            sync_compute(add, maps, maps)


def _side_by_side(
    client: Extraction,
    models: tuple[str, str],
    batches: Batches,
    taps: tuple[Sequence[Tap], Sequence[Tap]],
    add: Callable[[FeatureMaps, FeatureMaps], None],
) -> None:
    """Run two models on the same batches and pass what each batch gave to `add`."""
    shared = _Shared(batches)
    with (
        client.extract_stream(models[0], shared.branch(0), taps[0]) as stream_a,
        client.extract_stream(models[1], shared.branch(1), taps[1]) as stream_b,
    ):
        while (maps_a := _next(stream_a, batches, models[0])) is not None:
            maps_b = _next(stream_b, batches, models[1])
            if maps_b is None:
                raise BadReplyError(f"the stream of {models[1]} ended before that of {models[0]}")
            sync_compute(add, maps_a, maps_b)


def _next(stream: ExtractStream, batches: Batches, model_id: str) -> FeatureMaps | None:
    """Return what the next batch gave; None at the end."""
    try:
        result = next(stream)
    except StopIteration:
        return None
    except TrocarError as error:
        error.add_note(f"of {model_id}")
        raise
    return unwrapped(result, batches, model_id)


class _Shared:
    """The items of one iterable for two readers; what one has not read yet is kept.

    The readers are never further apart than the window of a stream, as their results are read in step.
    """

    def __init__(self, batches: Batches) -> None:
        self._source: SyncSource[Inputs] = SyncSource(batches)
        self._taking = SyncLock()
        self._waiting: tuple[deque[Inputs], deque[Inputs]] = (deque(), deque())
        self._error: Exception | None = None

    def branch(self, reader: int) -> _Branch:
        """Return the items for reader 0 or 1."""
        return _Branch(self, reader)

    def next(self, reader: int) -> Inputs:
        """Return a reader's next item.

        Raises:
            StopAsyncIteration: There is none.
        """
        with self._taking:
            if not self._waiting[reader]:
                self._take()
            return self._waiting[reader].popleft()

    def _take(self) -> None:
        if self._error is not None:  # for both readers: an iterator that has failed would just end
            raise self._error
        try:
            item = self._source.next()
        except Exception as error:
            self._error = error
            raise
        for waiting in self._waiting:
            waiting.append(item)


class _Branch:
    """One reader's items."""

    def __init__(self, shared: _Shared, reader: int) -> None:
        self._shared = shared
        self._reader = reader

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Inputs:
        return self._shared.next(self._reader)
