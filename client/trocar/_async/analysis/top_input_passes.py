"""Pass of the inputs that drive channels, with asyncio; `tools/generate_sync.py` generates the sync one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from trocar._analysis.analysis_inputs import Samples, batches_of, sample_labels, unwrapped
from trocar._analysis.neighbours.kept_samples import KeptSamples, TakenSamples
from trocar._analysis.neighbours.neighbours import PictureSources
from trocar._analysis.sample_inputs import sample_input
from trocar._analysis.top_inputs.channel_top import ChannelTop
from trocar._analysis.top_inputs.place_keeper import PlaceKeeper
from trocar._analysis.top_inputs.top_input_taps import TopInputTaps
from trocar._analysis.top_inputs.top_inputs import TopInputs
from trocar._async.analysis.seen_batches import AsyncSeenBatches
from trocar._base.concurrency import async_compute

if TYPE_CHECKING:
    from trocar._analysis.analysis_inputs import AsyncInputSet
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.models import AsyncModels


async def top_inputs(
    extraction: AsyncExtraction,
    models: AsyncModels,
    model_id: str,
    inputs: AsyncInputSet,
    taps: TopInputTaps,
    k: int,
    batch_size: int,
) -> TopInputs:
    """Pass of `AsyncRetrieval.top_inputs`."""
    batches = batches_of(inputs, batch_size)
    plan = await extraction.plan(model_id, None, taps.where)
    taps = taps.planned(plan)
    top, kept, places = ChannelTop(k), KeptSamples(), PlaceKeeper()
    seen = AsyncSeenBatches(batches)
    async with extraction.extract_stream(model_id, seen, taps.listed()) as stream:
        async for result in stream:
            maps, first = unwrapped(result, batches, model_id), top.count
            await async_compute(top.add, taps.values(maps), taps.positions(maps))
            wanted = places.update(top, first, taps.frame(maps))
            name, batch = sample_labels(batches, result.index), seen.answered()
            shown = () if isinstance(batches, Samples) else wanted
            kept.update(wanted, shown, first, name, partial(sample_input, batch))
    if not top.count:
        raise ValueError("inputs: no batches; pass at least one")
    model = await models.model(model_id)
    inputs_of = TakenSamples(batches) if isinstance(batches, Samples) else kept.inputs
    channels = taps.channels or tuple(range(len(top.values)))
    return TopInputs(
        channels,
        places.rows(top, channels, kept.names),
        model_id,
        taps.name,
        taps.by,
        top.count,
        {channel: int(count) for channel, count in zip(channels, top.nan_count, strict=True) if count},
        PictureSources(inputs_of, preprocessing=model.preprocessing),
    )
