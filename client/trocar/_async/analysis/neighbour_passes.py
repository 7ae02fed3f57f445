"""Passes of nearest neighbours, with asyncio; `tools/generate_sync.py` generates the sync ones."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from trocar._analysis.analysis_inputs import Samples, batches_of, sample_labels, unwrapped
from trocar._analysis.analysis_taps import one_tap, value_taps
from trocar._analysis.neighbours.kept_samples import KeptSamples, TakenSamples
from trocar._analysis.neighbours.metrics import check_metric
from trocar._analysis.neighbours.nearest_search import NearestSearch, check_count
from trocar._analysis.neighbours.neighbours import MOST_QUERIES_SHOWN, Neighbours, PictureSources
from trocar._analysis.neighbours.queries import Queries, named_queries, queries_of_vectors, rows_of
from trocar._analysis.sample_inputs import sample_input
from trocar._async.analysis.analysis_passes import averaged
from trocar._async.analysis.seen_batches import AsyncSeenBatches
from trocar._base.concurrency import async_compute

if TYPE_CHECKING:
    from typing import Any

    from trocar._analysis.analysis_inputs import AsyncBatches, AsyncInputSet
    from trocar._analysis.neighbours.metrics import Metric
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.models import AsyncModels
    from trocar._base.tensors import Array
    from trocar._request.taps import Tap


class AsyncNeighbourPasses:
    """The passes of one search.

    Args:
        extraction: Makes the passes.
        models: Describes the model, for the picture.
        model_id: The model.
        batch_size: The maximum number of samples in one pass.
    """

    def __init__(
        self, extraction: AsyncExtraction, models: AsyncModels, model_id: str, batch_size: int
    ) -> None:
        self._extraction = extraction
        self._models = models
        self._model_id = model_id
        self._batch_size = batch_size

    async def nearest(
        self,
        inputs: AsyncInputSet,
        at: str | Tap,
        queries: tuple[AsyncInputSet | None, object],
        k: int,
        metric: Metric,
    ) -> Neighbours:
        """Passes of `AsyncRetrieval.nearest`; of the queries, an input or a vector."""
        query, vector = queries
        if (query is None) == (vector is None):
            raise ValueError("give either query=, an input of the model, or vector=, features of its own")
        check_count(k)
        check_metric(metric)
        batches = batches_of(inputs, self._batch_size)
        (where,) = value_taps(one_tap(at))
        where = await averaged(self._extraction, self._model_id, where)
        asked = queries_of_vectors(vector) if query is None else await self._queries(query, where)
        return await self._search(asked, batches, where, NearestSearch(asked.rows, k, metric))

    async def _search(
        self, queries: Queries, batches: AsyncBatches, where: Tap, search: NearestSearch
    ) -> Neighbours:
        """Run the data set once."""
        kept, left_out, count = KeptSamples(), list[str](), 0
        seen = AsyncSeenBatches(batches)
        async with self._extraction.extract_stream(self._model_id, seen, where) as stream:
            async for result in stream:
                rows = rows_of(unwrapped(result, batches, self._model_id), where)
                odd = await async_compute(search.add, rows)
                name, batch = sample_labels(batches, result.index), seen.answered()
                kept.update(
                    search.nearest,
                    () if isinstance(batches, Samples) else search.shown(MOST_QUERIES_SHOWN),
                    count,
                    name,
                    partial(sample_input, batch),
                )
                left_out += [name(row - count) or f"sample {row}" for row in odd]
                count = search.row_count
        if not count:
            raise ValueError("inputs: no batches; pass at least one")
        indices, distances = search.result()
        inputs_of = TakenSamples(batches) if isinstance(batches, Samples) else kept.inputs
        model = await self._models.model(self._model_id)
        return Neighbours(
            indices,
            distances,
            tuple(tuple(kept.names[index] for index in row) for row in indices.tolist()),
            queries.names,
            search.metric,
            where.alias or where.selector,
            count,
            tuple(left_out),
            PictureSources(inputs_of, queries.inputs, model.preprocessing),
        )

    async def _queries(self, inputs: AsyncInputSet, where: Tap) -> Queries:
        """Run queries through the model."""
        batches = batches_of(inputs, self._batch_size)
        seen = AsyncSeenBatches(batches)
        rows: list[Array] = []
        names: list[str] = []
        shown: list[Any] = []
        async with self._extraction.extract_stream(self._model_id, seen, where) as stream:
            async for result in stream:
                values = rows_of(unwrapped(result, batches, self._model_id), where)
                name, batch = sample_labels(batches, result.index), seen.answered()
                rows.append(values)
                names += [name(position) for position in range(len(values))]
                left = MOST_QUERIES_SHOWN - len(shown)
                shown += [sample_input(batch, position) for position in range(min(len(values), left))]
        if not rows:
            raise ValueError("query: no batches; pass at least one")
        return Queries(np.concatenate(rows), named_queries(names), tuple(shown))
