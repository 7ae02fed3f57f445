"""Passes of attributions, with asyncio; `tools/generate_sync.py` generates the sync ones.

In a stream each batch holds copies of a group of samples: points of a path, noisy copies, or occluded ones.
All passes are exact, as those with gradients always are: scores are subtracted from each other.
The mathematics is in `trocar._attribution`, which knows no client.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trocar._async.analysis.analysis_passes import executed
from trocar._attribution import cam, methods
from trocar._attribution.attribution import Attribution
from trocar._attribution.attribution_inputs import array_input, baseline_array, check_float, check_input
from trocar._attribution.attribution_objectives import (
    IMAGES,
    INPUT,
    OUTPUT,
    classes_of,
    input_port,
    numbered,
    predicted,
)
from trocar._attribution.attribution_request import AttributionRequest, one_value
from trocar._attribution.noise import NoisyBatches
from trocar._attribution.occlusion import OccludedBatches, OcclusionSum, windows
from trocar._attribution.path import (
    Conductance,
    Interpolants,
    PathIntegral,
    convergence_delta,
    gauss_legendre,
    joined,
)
from trocar._attribution.place import KnownPlaces, default_place
from trocar._base.call_options import EXACT
from trocar._base.concurrency import async_compute
from trocar._request.edits import edit
from trocar._request.taps import tap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trocar._async.extraction import AsyncExtraction
    from trocar._attribution.path import Rule
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array
    from trocar._base.types import Model
    from trocar._request.edits import Edit
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMapInfo, FeatureMaps

VALUE, GRADIENT = "value", "gradient"
"""What the feature map and its gradient are called in a reply."""


async def attribute(  # noqa: PLR0913, PLR0917 - one caller, which passes all of them
    extraction: AsyncExtraction,
    model: Model,
    inputs: Inputs,
    method: str,
    options: methods.Options,
    of: Objective | None,
    at: str | None,
    batch_size: int,
    known: KnownPlaces,
) -> Attribution:
    """Passes of `AsyncAttributions.attribute`; the place is chosen where `at` is None."""
    model_id = model.model_id
    of = None if of is None else numbered(of, model.categories)
    request, scores = await _requested(extraction, model, inputs, of, batch_size)
    if at is None:
        at, options = await _placed(extraction, model, request, method, options, known)
    classes = classes_of(request.of, request.samples)
    attribution = Attribution(
        values=request.inputs,
        method=method,
        at=at,
        model_id=model_id,
        inputs=request.inputs,
        classes=classes,
        class_names=_names(model.categories, classes),
        scores=scores,
        channel_dim=getattr(options, "channel_dim", None),
        grid=getattr(options, "grid", None),
        preprocessing=model.preprocessing,
    )
    return await _answered(extraction, request, options, attribution)


async def _requested(
    extraction: AsyncExtraction, model: Model, inputs: Inputs, of: Objective | None, batch_size: int
) -> tuple[AttributionRequest, Floats | None]:
    """Return the request, and the scores of the inputs if a pass was needed for them.

    A pass is needed for images, as attributions are of the model's own input, and for predicted classes.
    """
    values, name, model_id = array_input(inputs), "", model.model_id
    if values is not None and of is not None:
        return AttributionRequest(model_id, check_input(values), of, batch_size), None
    taps = [] if of is not None else [tap(OUTPUT)]
    if values is None:
        has_images = any(entry.name == IMAGES for entry in model.inputs)
        taps.append(tap(input_port(IMAGES if has_images else "")))
    try:
        given = inputs if values is None else check_input(values)
        maps = await extraction.extract(model_id, given, taps, options=EXACT)
    except Exception as error:
        if of is None:
            error.add_note("while computing the predicted class; pass of= to choose the objective")
        raise
    if values is None:
        name = "" if INPUT in maps else IMAGES
        values = maps[input_port(name)]
    request = AttributionRequest(model_id, values, of or predicted(one_value(maps, OUTPUT)), batch_size, name)
    return request, None if of is not None else request.scores({OUTPUT: one_value(maps, OUTPUT)})


async def _placed(
    extraction: AsyncExtraction,
    model: Model,
    request: AttributionRequest,
    method: str,
    options: methods.Options,
    known: KnownPlaces,
) -> tuple[str, methods.Options]:
    """Return the default place, and the options with its layout where the caller has given none.

    Only the first call for a model and a shape of inputs needs a dry run.
    """
    if not isinstance(options, methods.AT_MODULE):
        return request.port, options
    place = known.find(model, request.inputs.shape)
    if place is None:
        values = await executed(extraction, request.model_id, request.given(request.inputs))
        try:
            place = default_place(values, request.inputs.shape)
        except ValueError as error:
            raise ValueError(f"{method} of {request.model_id} needs at=: {error}") from None
        known.keep(model, request.inputs.shape, place)
    if options.channel_dim is None and options.grid is None:
        options = replace(options, channel_dim=place.channel_dim)
    return place.at, options


async def _answered(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.Options, results: Attribution
) -> Attribution:
    match options:
        case methods.IntegratedGradients():
            values = await integrated(extraction, request, options)
            return await _on_path(extraction, request, options, replace(results, values=values))
        case methods.LayerConductance():
            values, described = await conducted(extraction, request, options, results.at)
            results = replace(results, values=values, described=described)
            return await _on_path(extraction, request, options, results)
        case methods.SmoothGrad():
            values = await smoothed(extraction, request, options, results.at)
            return await _scored(extraction, request, replace(results, values=values))
        case methods.Occlusion():
            return await _occluded(extraction, request, options, results)
        case methods.GradCam():
            return await _cam(extraction, request, options, results)
        case _:
            return await _gradient(extraction, request, options, results)


async def _gradient(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.Options, results: Attribution
) -> Attribution:
    """Run saliency, input x gradient or guided backpropagation: one pass."""
    edits: list[Edit] = []
    if isinstance(options, methods.GuidedBackprop):
        relus = [options.relus] if isinstance(options.relus, str) else options.relus
        edits = [edit(f"{selector}/grad_out", "clamp", low=0.0) for selector in relus]
    has_value = isinstance(options, methods.InputXGradient)
    try:
        maps, results = await _one_pass(extraction, request, results, taps_at(results.at, has_value), edits)
    except Exception as error:
        if edits:
            error.add_note("guided_backprop clamps gradients at modules of type ReLU; relus= names others")
        raise
    return replace(results, values=combined(maps, options))


async def _cam(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.GradCam, results: Attribution
) -> Attribution:
    maps, results = await _one_pass(extraction, request, results, taps_at(results.at, True))
    described = maps.info.get(VALUE)
    value, gradient = (
        cam.channels_first(maps[name], options.channel_dim, options.grid, described)
        for name in (VALUE, GRADIENT)
    )
    is_plus_plus = isinstance(options, methods.GradCamPlusPlus)
    combine = cam.grad_cam_plus_plus if is_plus_plus else cam.grad_cam
    values = await async_compute(combine, value, gradient)
    return replace(results, values=values.astype(np.float32), is_map=True, described=described)


async def _one_pass(
    extraction: AsyncExtraction,
    request: AttributionRequest,
    results: Attribution,
    taps: Sequence[Tap],
    edits: Sequence[Edit] = (),
) -> tuple[FeatureMaps, Attribution]:
    """Compute gradients and scores of the entire batch at once."""
    wanted = request.score_taps() if results.scores is None else []
    maps = await extraction.extract(
        request.model_id, request.given(request.inputs), [*taps, *wanted], edits=edits, of=request.of
    )
    scores = request.scores(maps) if wanted else results.scores
    return maps, replace(results, scores=scores, objective=maps.objective)


async def _on_path(
    extraction: AsyncExtraction,
    request: AttributionRequest,
    options: methods.IntegratedGradients | methods.LayerConductance,
    results: Attribution,
) -> Attribution:
    """Add the scores, and the convergence delta of the attributions."""
    results = await _scored(extraction, request, results)
    if not options.delta:
        return results
    if results.scores is None:
        raise ValueError("delta needs an objective of class scores, such as trocar.logit")
    baseline = baseline_array(options.baseline, request.inputs)
    given = request.given(np.ascontiguousarray(baseline))
    maps = await extraction.extract(request.model_id, given, request.score_taps(), options=EXACT)
    start = request.scores(maps)
    assert start is not None  # since the scores of the inputs exist
    return replace(
        results, delta=convergence_delta(results.values, np.asarray(results.scores, np.float64), start)
    )


async def _scored(
    extraction: AsyncExtraction, request: AttributionRequest, results: Attribution
) -> Attribution:
    """Add the scores of the inputs, if they can be computed."""
    if results.scores is None and request.score_taps():
        taps = request.score_taps()
        given = request.given(request.inputs)
        maps = await extraction.extract(request.model_id, given, taps, options=EXACT)
        results = replace(results, scores=request.scores(maps))
    if results.scores is None:
        return results
    return replace(results, objective=float(np.sum(results.scores)) + request.of.offset)


async def _occluded(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.Occlusion, results: Attribution
) -> Attribution:
    """Run occlusion: forward passes only."""
    results = await _scored(extraction, request, results)
    if results.scores is None:
        raise ValueError("occlusion needs an objective of class scores, such as trocar.logit")
    places = windows(request.inputs.shape[1:], options.window, options.stride)
    baseline = baseline_array(options.baseline, request.inputs)
    parts = []
    for group in request.groups():
        per_batch = max(1, request.batch_size // (group.stop - group.start))
        batches = OccludedBatches(request.inputs[group], baseline[group], places, per_batch)
        parts.append(await occlusion_sum(extraction, request, group, batches, results.scores[group]))
    return replace(results, values=joined(parts).astype(np.float32))


def _names(categories: Sequence[str], classes: tuple[int, ...] | None) -> tuple[str, ...]:
    if not categories or classes is None:
        return ()
    return tuple(categories[number] if 0 <= number < len(categories) else "" for number in classes)


async def integrated(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.IntegratedGradients
) -> Array:
    """Return the integrated gradients of every sample."""
    inputs = check_float(request.inputs, "integrated_gradients")
    baseline, rule = baseline_array(options.baseline, inputs), gauss_legendre(options.steps)
    parts = [await _integral(extraction, request, group, baseline, rule) for group in request.groups()]
    return ((inputs - baseline) * joined(parts)).astype(inputs.dtype)


async def _integral(
    extraction: AsyncExtraction, request: AttributionRequest, group: slice, baseline: Array, rule: Rule
) -> Floats:
    per_batch = request.copies_per_batch(len(rule.alphas), group)
    path = Interpolants(request.inputs[group], baseline[group], rule.alphas, per_batch)
    integral = PathIntegral(rule.weights)

    def add(index: int, maps: FeatureMaps) -> None:
        integral.add(path.points(maps[GRADIENT], index))

    await _each(extraction, request, path, taps_at(request.port), request.objective(group, per_batch), add)
    return integral.value


async def conducted(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.LayerConductance, at: str
) -> tuple[Array, FeatureMapInfo | None]:
    """Return the conductance of every element of a feature map, for every sample, and its description."""
    inputs = check_float(request.inputs, "layer_conductance")
    baseline, rule = baseline_array(options.baseline, inputs), gauss_legendre(options.steps + 1)
    parts = [await _conductance(extraction, request, group, baseline, rule, at) for group in request.groups()]
    return joined([values for values, _ in parts]).astype(np.float32), parts[0][1]


async def _conductance(
    extraction: AsyncExtraction,
    request: AttributionRequest,
    group: slice,
    baseline: Array,
    rule: Rule,
    at: str,
) -> tuple[Floats, FeatureMapInfo | None]:
    per_batch = request.copies_per_batch(len(rule.alphas), group)
    path = Interpolants(request.inputs[group], baseline[group], rule.alphas, per_batch)
    total = Conductance()
    described: list[FeatureMapInfo | None] = []

    def add(index: int, maps: FeatureMaps) -> None:
        described.append(cam.samples_first(maps.info.get(VALUE)))
        total.add(path.points(maps[VALUE], index), path.points(maps[GRADIENT], index))

    of = request.objective(group, per_batch)
    await _each(extraction, request, path, taps_at(at, True), of, add)
    return total.value, described[0]


async def smoothed(
    extraction: AsyncExtraction, request: AttributionRequest, options: methods.SmoothGrad, at: str
) -> Array:
    """Return the mean of a method over noisy copies."""
    inputs = check_float(request.inputs, "smoothgrad")
    over = options.over
    if isinstance(over, methods.IntegratedGradients):
        noisy = NoisyBatches(inputs, options.samples, options.sigma, options.seed, 0, 1)
        total = np.zeros(inputs.shape)
        for copy in noisy:
            total += await integrated(extraction, replace(request, inputs=copy), over)
        return (total / options.samples).astype(inputs.dtype)
    parts = [await _mean_of_copies(extraction, request, options, at, group) for group in request.groups()]
    return joined(parts).astype(np.float32)


async def _mean_of_copies(
    extraction: AsyncExtraction,
    request: AttributionRequest,
    options: methods.SmoothGrad,
    at: str,
    group: slice,
) -> Floats:
    per_batch = request.copies_per_batch(options.samples, group)
    noisy = NoisyBatches(
        request.inputs[group], options.samples, options.sigma, options.seed, group.start, per_batch
    )
    mean = PathIntegral(np.full(options.samples, 1 / options.samples))

    def add(index: int, maps: FeatureMaps) -> None:
        mean.add(noisy.rows(combined(maps, options.over), index))

    taps = taps_at(at, isinstance(options.over, methods.InputXGradient))
    await _each(extraction, request, noisy, taps, request.objective(group, per_batch), add)
    return mean.value


async def occlusion_sum(
    extraction: AsyncExtraction,
    request: AttributionRequest,
    group: slice,
    batches: OccludedBatches,
    scores: Floats,
) -> Floats:
    total = OcclusionSum(batches.inputs.shape, scores)
    places = batches.places()

    def add(index: int, maps: FeatureMaps) -> None:
        chosen = next(places)
        outcome = request.scores(maps, group, len(chosen))
        assert outcome is not None  # since the scores of the inputs exist
        total.add(chosen, outcome)

    await _each(extraction, request, batches, request.score_taps(), None, add)
    return total.value


async def _each(
    extraction: AsyncExtraction,
    request: AttributionRequest,
    batches: Iterable[Array],
    taps: Sequence[Tap],
    of: Objective | None,
    add: Callable[[int, FeatureMaps], None],
) -> None:
    """Run a pass for each batch, several in flight, and pass the result of each to `add`, in order."""
    given = map(request.given, batches)
    async with extraction.extract_stream(request.model_id, given, taps, of=of, options=EXACT) as stream:
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
