"""Streams of attribution passes, with asyncio; `tools/generate_sync.py` generates the sync ones.

Each batch holds copies of a group of samples: points of a path, noisy copies, or occluded ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trocar._attribution import methods
from trocar._attribution.attribution_inputs import baseline_array, check_float
from trocar._attribution.attribution_objectives import INPUT
from trocar._attribution.noise import NoisyBatches
from trocar._attribution.occlusion import OcclusionSum
from trocar._attribution.path import Conductance, Interpolants, PathIntegral, gauss_legendre, joined
from trocar._base.concurrency import async_compute
from trocar._request.taps import tap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trocar._async.extraction import AsyncExtraction
    from trocar._attribution.occlusion import OccludedBatches
    from trocar._attribution.path import Rule
    from trocar._attribution.question import Question
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps

VALUE, GRADIENT = "value", "gradient"
"""What the feature map and its gradient are called in a reply."""


async def integrated(
    extraction: AsyncExtraction, question: Question, options: methods.IntegratedGradients
) -> Array:
    """Return the integrated gradients of every sample."""
    inputs = check_float(question.inputs, "integrated_gradients")
    baseline, rule = baseline_array(options.baseline, inputs), gauss_legendre(options.steps)
    parts = [await _integral(extraction, question, group, baseline, rule) for group in question.groups()]
    return ((inputs - baseline) * joined(parts)).astype(inputs.dtype)


async def _integral(
    extraction: AsyncExtraction, question: Question, group: slice, baseline: Array, rule: Rule
) -> Floats:
    per_batch = question.copies_per_batch(len(rule.alphas), group)
    path = Interpolants(question.inputs[group], baseline[group], rule.alphas, per_batch)
    integral = PathIntegral(rule.weights)

    def add(index: int, maps: FeatureMaps) -> None:
        integral.add(path.points(maps[GRADIENT], index))

    await _each(
        extraction, question.model_id, path, taps_at(INPUT), question.objective(group, per_batch), add
    )
    return integral.value


async def conducted(
    extraction: AsyncExtraction, question: Question, options: methods.LayerConductance, at: str
) -> Array:
    """Return the conductance of every element of a feature map, for every sample."""
    inputs = check_float(question.inputs, "layer_conductance")
    baseline, rule = baseline_array(options.baseline, inputs), gauss_legendre(options.steps + 1)
    parts = [
        await _conductance(extraction, question, group, baseline, rule, at) for group in question.groups()
    ]
    return joined(parts).astype(np.float32)


async def _conductance(
    extraction: AsyncExtraction, question: Question, group: slice, baseline: Array, rule: Rule, at: str
) -> Floats:
    per_batch = question.copies_per_batch(len(rule.alphas), group)
    path = Interpolants(question.inputs[group], baseline[group], rule.alphas, per_batch)
    total = Conductance()

    def add(index: int, maps: FeatureMaps) -> None:
        total.add(path.points(maps[VALUE], index), path.points(maps[GRADIENT], index))

    of = question.objective(group, per_batch)
    await _each(extraction, question.model_id, path, taps_at(at, True), of, add)
    return total.value


async def smoothed(
    extraction: AsyncExtraction, question: Question, options: methods.SmoothGrad, at: str
) -> Array:
    """Return the mean of a method over noisy copies."""
    inputs = check_float(question.inputs, "smoothgrad")
    over = options.over
    if isinstance(over, methods.IntegratedGradients):
        noisy = NoisyBatches(inputs, options.samples, options.sigma, options.seed, 0, 1)
        total = np.zeros(inputs.shape)
        for copy in noisy:
            total += await integrated(extraction, replace(question, inputs=copy), over)
        return (total / options.samples).astype(inputs.dtype)
    parts = [await _mean_of_copies(extraction, question, options, at, group) for group in question.groups()]
    return joined(parts).astype(np.float32)


async def _mean_of_copies(
    extraction: AsyncExtraction, question: Question, options: methods.SmoothGrad, at: str, group: slice
) -> Floats:
    per_batch = question.copies_per_batch(options.samples, group)
    noisy = NoisyBatches(
        question.inputs[group], options.samples, options.sigma, options.seed, group.start, per_batch
    )
    mean = PathIntegral(np.full(options.samples, 1 / options.samples))

    def add(index: int, maps: FeatureMaps) -> None:
        mean.add(noisy.rows(combined(maps, options.over), index))

    taps = taps_at(at, isinstance(options.over, methods.InputXGradient))
    await _each(extraction, question.model_id, noisy, taps, question.objective(group, per_batch), add)
    return mean.value


async def occlusion_sum(
    extraction: AsyncExtraction, question: Question, group: slice, batches: OccludedBatches, scores: Floats
) -> Floats:
    total = OcclusionSum(batches.inputs.shape, scores)
    places = batches.places()

    def add(index: int, maps: FeatureMaps) -> None:
        chosen = next(places)
        found = question.scores(maps, group, len(chosen))
        assert found is not None  # since the scores of the inputs exist
        total.add(chosen, found)

    await _each(extraction, question.model_id, batches, question.score_taps(), None, add)
    return total.value


async def _each(
    extraction: AsyncExtraction,
    model_id: str,
    batches: Iterable[Array],
    taps: Sequence[Tap],
    of: Objective | None,
    add: Callable[[int, FeatureMaps], None],
) -> None:
    """Run a pass for each batch, several in flight, and pass the result of each to `add`, in order."""
    async with extraction.extract_stream(model_id, batches, taps, of=of) as stream:
        async for result in stream:
            await async_compute(add, result.index, result.unwrap())


def taps_at(at: str, has_value: bool = False) -> list[Tap]:
    gradient = tap(at, alias=GRADIENT, gradient=True)
    return [tap(at, alias=VALUE), gradient] if has_value else [gradient]


def combined(maps: FeatureMaps, options: methods.Options) -> Array:
    """Return the attributions of a gradient method from one pass."""
    gradient = maps[GRADIENT]
    if isinstance(options, methods.InputXGradient):
        return maps[VALUE] * gradient
    return np.abs(gradient) if isinstance(options, methods.Saliency) and options.abs else gradient
