"""Passes of representational similarity, with asyncio; `tools/generate_sync.py` generates the sync ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._analysis.similarity.cka import FeatureCollector
from trocar._analysis.similarity.rdms import check_kinds, checked_rdm
from trocar._analysis.similarity.rsa import Rsa, compared
from trocar._async.analysis.analysis_passes import collect
from trocar._base.concurrency import async_compute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trocar._analysis.analysis_inputs import AsyncInputSet
    from trocar._analysis.analysis_taps import Taps
    from trocar._analysis.similarity.rdms import Compare, Distance
    from trocar._async.extraction import AsyncExtraction


async def rsa(
    extraction: AsyncExtraction,
    models: tuple[str, str],
    inputs: AsyncInputSet,
    taps: tuple[Taps, Taps | None],
    own: Mapping[str, object],
    kinds: tuple[Distance, Compare],
    batch_size: int,
) -> Rsa:
    """Passes of `AsyncAnalyses.rsa`; the second of `models` and of `taps` is for the columns."""
    distance, compare = kinds
    check_kinds(distance, compare)
    with FeatureCollector() as left, FeatureCollector() as right:
        names = await collect(extraction, models, inputs, taps, batch_size, (left, right))
        rdms = await async_compute(left.dissimilarities, distance)
        others = rdms if models[0] == models[1] else await async_compute(right.dissimilarities, distance)
        count = left.count
    rows = {name: rdms[name] for name in names[0]}
    columns = {name: others[name] for name in names[1]}
    for name, rdm in own.items():
        if name in columns:
            raise ValueError(f"rdms has {name!r}, which is the name of a feature map; give another name")
        columns[name] = checked_rdm(name, rdm, count)
    matrix = await async_compute(compared, rows, columns, compare)
    return Rsa(matrix, tuple(rows), tuple(columns), *models, distance, compare, rows, columns)
