"""A client whose models are NumPy functions, for both kinds of clients."""

import itertools
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from trocar import BatchResult, ExtractionPlan, FeatureMapInfo, FeatureMaps, ServerTiming, Statistics, Tap
from trocar._base.call_options import CallOptions
from trocar._base.tensors import Array
from trocar.errors import InvalidArgumentError, UnknownModuleError

Function = Callable[[Array], Array]
EXAMPLE = (1, 3, 4, 4)


@dataclass
class FakeModels:
    """What the server would be: models, each with its feature maps by name, in execution order."""

    models: Mapping[str, Mapping[str, Function]]
    failing: Mapping[tuple[str, int], Exception] = field(default_factory=dict)
    """What batch of which model fails, and how."""
    streams: list[tuple[str, tuple[Tap, ...]]] = field(default_factory=list)
    """The model and the taps of every stream."""
    batches: list[Array] = field(default_factory=list)
    """Every batch that was computed."""

    def result(self, model_id: str, index: int, batch: Any, taps: Sequence[Tap]) -> BatchResult:
        error = self.failing.get((model_id, index))
        if error is not None:
            return BatchResult(index, None, error)
        self.batches.append(np.asarray(batch))
        return BatchResult(index, self.maps(model_id, np.asarray(batch), taps))

    def maps(self, model_id: str, batch: Array, taps: Sequence[Tap]) -> FeatureMaps:
        names = self._names(model_id, taps)
        values = {
            name: reduced(tap, self.models[model_id][function](batch))
            for name, (tap, function) in names.items()
        }
        expansions = {
            tap.selector: tuple(name for name, (owner, _) in names.items() if owner.selector == tap.selector)
            for tap in taps
        }
        for name, array in values.items():
            if names[name][0].over == "channel" and array.ndim < 2:
                raise InvalidArgumentError(f"{name!r} has no channels")
        return FeatureMaps(
            {name: array for name, array in values.items() if names[name][0].values},
            info={name: info(name, function, values[name]) for name, (_, function) in names.items()},
            stats={},
            expansions=expansions,
            timing=ServerTiming(0.0, 0.0),
            model_id=model_id,
        )

    def plan(self, model_id: str, inputs: None, taps: Tap | Sequence[Tap]) -> ExtractionPlan:
        assert inputs is None
        chosen = [taps] if isinstance(taps, Tap) else list(taps)
        maps = self.maps(model_id, np.zeros(EXAMPLE), chosen)
        return ExtractionPlan(model_id, maps.info, maps.expansions, None, 0, 0, 0, True)

    def _names(self, model_id: str, taps: Sequence[Tap]) -> dict[str, tuple[Tap, str]]:
        functions = self.models[model_id]
        found: dict[str, tuple[Tap, str]] = {}
        for tap in taps:
            if tap.selector == "**":
                found |= {name: (tap, name) for name in functions if "/" not in name}
            elif tap.selector.endswith("*"):
                found |= {name: (tap, name) for name in functions if name.startswith(tap.selector[:-1])}
            elif tap.selector in functions:
                found[tap.alias or tap.selector] = (tap, tap.selector)
            else:
                raise UnknownModuleError(f"no module {tap.selector!r}")
        return found


def reduced(tap: Tap, values: Array) -> Array:
    if not tap.reduce:
        return values
    assert [str(reduction.message).split()[0] for reduction in tap.reduce] == ["pool"]
    return np.asarray(values.mean(axis=1 if values.ndim == 3 else tuple(range(2, values.ndim))))


def info(name: str, function: str, values: Array) -> FeatureMapInfo:
    path, _, port = function.partition("/")
    path, _, call = path.partition("@")
    return FeatureMapInfo(
        name=name,
        path=path,
        type="Conv2d",
        call_index=int(call or 0),
        port=port or "out",
        pick="",
        shape=values.shape,
        dtype=str(values.dtype),
        has_values=True,
    )


def channel_statistics(values: Sequence[Array]) -> Statistics:
    """NumPy's statistics over the channels of batches, in float64."""
    rank = values[0].ndim
    dim = 2 if rank == 3 else 1
    rows = np.concatenate([np.moveaxis(v, dim, -1).reshape(-1, v.shape[dim]) for v in values])
    rows = rows.astype(np.float64)
    with np.errstate(invalid="ignore"):
        numbers = {
            "absmax": np.abs(rows).max(axis=0),
            "nan_count": np.isnan(rows).sum(axis=0).astype(np.float64),
            "mean": rows.mean(axis=0),
            "covariance": np.cov(rows.T, bias=True).reshape(rows.shape[1], rows.shape[1]),
            "count": np.full(rows.shape[1], float(len(rows))),
        }
    return Statistics(numbers, over="channel", channel_dim=dim)


class FakeStream:
    """The results of a stream, plain or asynchronous."""

    def __init__(self, fake: FakeModels, model_id: str, batches: Any, taps: Sequence[Tap]) -> None:
        self._fake, self._model_id, self._taps = fake, model_id, list(taps)
        self._batches = batches
        self._collected: dict[str, list[Array]] = {}
        self._plain: Iterator[BatchResult] | None = None
        self._other: AsyncIterator[BatchResult] | None = None
        self.is_closed = False

    @property
    def statistics(self) -> dict[str, Statistics]:
        return {name: channel_statistics(values) for name, values in self._collected.items()}

    def _keep(self, result: BatchResult) -> BatchResult:
        if result.maps is not None:
            every = [Tap(tap.selector, alias=tap.alias, reduce=tap.reduce) for tap in self._taps]
            batch = self._fake.batches[-1]
            for name, values in self._fake.maps(self._model_id, batch, every).items():
                self._collected.setdefault(name, []).append(values)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_closed = True

    def __iter__(self) -> Iterator[BatchResult]:
        return self

    def __next__(self) -> BatchResult:
        if self._plain is None:
            self._plain = self._results()
        return next(self._plain)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.is_closed = True

    def __aiter__(self) -> AsyncIterator[BatchResult]:
        return self

    async def __anext__(self) -> BatchResult:
        if self._other is None:
            self._other = self._async_results()
        return await anext(self._other)

    def _results(self) -> Iterator[BatchResult]:
        self._fake.maps(self._model_id, np.zeros(EXAMPLE), self._taps)  # an unknown selector ends a stream
        for index, batch in enumerate(self._batches):
            yield self._keep(self._fake.result(self._model_id, index, batch, self._taps))

    async def _async_results(self) -> AsyncIterator[BatchResult]:
        self._fake.maps(self._model_id, np.zeros(EXAMPLE), self._taps)
        count = itertools.count()
        async for batch in _any_iterable(self._batches):
            yield self._keep(self._fake.result(self._model_id, next(count), batch, self._taps))


async def _any_iterable(items: Any) -> AsyncIterator[Any]:
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class FakeClient:
    """The methods of a client that the analyses call."""

    def __init__(self, fake: FakeModels) -> None:
        self.fake = fake

    def extract_stream(
        self,
        model_id: str,
        batches: Any,
        taps: Sequence[Tap],
        *,
        running_statistics: bool = False,
        edits: tuple[()] = (),
        options: CallOptions | None = None,
    ) -> FakeStream:
        self.fake.streams.append((model_id, tuple(taps)))
        return FakeStream(self.fake, model_id, batches, taps)

    def plan(self, model_id: str, inputs: None, taps: Any) -> ExtractionPlan:
        return self.fake.plan(model_id, inputs, taps)


class AsyncFakeClient(FakeClient):
    """The same for asyncio."""

    async def plan(self, model_id: str, inputs: None, taps: Any) -> ExtractionPlan:  # type: ignore[override]
        return self.fake.plan(model_id, inputs, taps)
