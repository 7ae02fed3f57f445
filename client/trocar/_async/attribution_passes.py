"""Passes of attributions, with asyncio; `tools/generate_sync.py` generates the sync ones.

In a stream each batch holds copies of a group of samples: points of a path, noisy copies, or occluded ones.
The mathematics is in `trocar._attribution`, which knows no client.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trocar._async.analysis_passes import executed
from trocar._attribution import cam, methods
from trocar._attribution.attribution import Attribution
from trocar._attribution.attribution_inputs import array_input, baseline_array, check_float, check_input
from trocar._attribution.attribution_objectives import INPUT, OUTPUT, classes_of, predicted
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
from trocar._attribution.question import Question
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
    from trocar._result.feature_maps import FeatureMaps

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
    question, scores = await _question(extraction, model_id, inputs, of, batch_size)
    if at is None:
        at, options = await _placed(extraction, model, question, method, options, known)
    classes = classes_of(question.of, question.samples)
    found = Attribution(
        values=question.inputs,
        method=method,
        at=at,
        model_id=model_id,
        inputs=question.inputs,
        classes=classes,
        class_names=_names(model.categories, classes),
        scores=scores,
        channel_dim=getattr(options, "channel_dim", None),
        grid=getattr(options, "grid", None),
        preprocessing=model.preprocessing,
    )
    return await _answered(extraction, question, options, found)


async def _question(
    extraction: AsyncExtraction, model_id: str, inputs: Inputs, of: Objective | None, batch_size: int
) -> tuple[Question, Floats | None]:
    """Return the request, and the scores of the inputs if a pass was needed for them.

    A pass is needed for images, as attributions are of the model's own input, and for predicted classes.
    """
    values = array_input(inputs)
    if values is not None and of is not None:
        return Question(model_id, check_input(values), of, batch_size), None
    taps = [] if of is not None else [tap(OUTPUT, alias=VALUE)]
    if values is None:
        taps.append(tap(INPUT, alias="input"))
    try:
        maps = await extraction.extract(model_id, inputs if values is None else check_input(values), taps)
    except Exception as error:
        if of is None:
            error.add_note("while computing the predicted class; pass of= to choose the objective")
        raise
    if values is None:
        values = maps["input"]
    question = Question(model_id, values, of or predicted(maps[VALUE]), batch_size)
    return question, None if of is not None else question.scores({"score0": maps[VALUE]})


async def _placed(
    extraction: AsyncExtraction,
    model: Model,
    question: Question,
    method: str,
    options: methods.Options,
    known: KnownPlaces,
) -> tuple[str, methods.Options]:
    """Return the default place, and the options with its layout where the caller has given none.

    Only the first call for a model and a shape of inputs needs a dry run.
    """
    if not isinstance(options, methods.AT_MODULE):
        return INPUT, options
    place = known.find(model, question.inputs.shape)
    if place is None:
        values = await executed(extraction, question.model_id, question.inputs)
        try:
            place = default_place(values, question.inputs.shape)
        except ValueError as error:
            raise ValueError(f"{method} of {question.model_id} needs at=: {error}") from None
        known.keep(model, question.inputs.shape, place)
    if options.channel_dim is None and options.grid is None:
        options = replace(options, channel_dim=place.channel_dim, grid=place.grid)
    return place.at, options


async def _answered(
    extraction: AsyncExtraction, question: Question, options: methods.Options, found: Attribution
) -> Attribution:
    match options:
        case methods.IntegratedGradients():
            values = await integrated(extraction, question, options)
            return await _on_path(extraction, question, options, replace(found, values=values))
        case methods.LayerConductance():
            values = await conducted(extraction, question, options, found.at)
            return await _on_path(extraction, question, options, replace(found, values=values))
        case methods.SmoothGrad():
            values = await smoothed(extraction, question, options, found.at)
            return await _scored(extraction, question, replace(found, values=values))
        case methods.Occlusion():
            return await _occluded(extraction, question, options, found)
        case methods.GradCam():
            return await _cam(extraction, question, options, found)
        case _:
            return await _gradient(extraction, question, options, found)


async def _gradient(
    extraction: AsyncExtraction, question: Question, options: methods.Options, found: Attribution
) -> Attribution:
    """Run saliency, input x gradient or guided backpropagation: one pass."""
    edits: list[Edit] = []
    if isinstance(options, methods.GuidedBackprop):
        relus = [options.relus] if isinstance(options.relus, str) else options.relus
        edits = [edit(f"{selector}/grad_out", "clamp", low=0.0) for selector in relus]
    has_value = isinstance(options, methods.InputXGradient)
    try:
        maps, found = await _one_pass(extraction, question, found, taps_at(found.at, has_value), edits)
    except Exception as error:
        if edits:
            error.add_note("guided_backprop clamps gradients at modules of type ReLU; relus= names others")
        raise
    return replace(found, values=combined(maps, options))


async def _cam(
    extraction: AsyncExtraction, question: Question, options: methods.GradCam, found: Attribution
) -> Attribution:
    maps, found = await _one_pass(extraction, question, found, taps_at(found.at, True))
    value, gradient = (
        cam.channels_first(maps[name], options.channel_dim, options.grid) for name in (VALUE, GRADIENT)
    )
    is_plus_plus = isinstance(options, methods.GradCamPlusPlus)
    combine = cam.grad_cam_plus_plus if is_plus_plus else cam.grad_cam
    values = await async_compute(combine, value, gradient)
    return replace(found, values=values.astype(np.float32), is_map=True)


async def _one_pass(
    extraction: AsyncExtraction,
    question: Question,
    found: Attribution,
    taps: Sequence[Tap],
    edits: Sequence[Edit] = (),
) -> tuple[FeatureMaps, Attribution]:
    """Compute gradients and scores of the entire batch at once."""
    wanted = question.score_taps() if found.scores is None else []
    maps = await extraction.extract(
        question.model_id, question.inputs, [*taps, *wanted], edits=edits, of=question.of
    )
    scores = question.scores(maps) if wanted else found.scores
    return maps, replace(found, scores=scores, objective=maps.objective)


async def _on_path(
    extraction: AsyncExtraction,
    question: Question,
    options: methods.IntegratedGradients | methods.LayerConductance,
    found: Attribution,
) -> Attribution:
    """Add the scores, and the convergence delta of the attributions."""
    found = await _scored(extraction, question, found)
    if not options.delta:
        return found
    if found.scores is None:
        raise ValueError("delta needs an objective of class scores, such as trocar.logit")
    baseline = baseline_array(options.baseline, question.inputs)
    maps = await extraction.extract(question.model_id, np.ascontiguousarray(baseline), question.score_taps())
    start = question.scores(maps)
    assert start is not None  # since the scores of the inputs exist
    return replace(found, delta=convergence_delta(found.values, np.asarray(found.scores, np.float64), start))


async def _scored(extraction: AsyncExtraction, question: Question, found: Attribution) -> Attribution:
    """Add the scores of the inputs, if they can be computed."""
    if found.scores is None and question.score_taps():
        maps = await extraction.extract(question.model_id, question.inputs, question.score_taps())
        found = replace(found, scores=question.scores(maps))
    if found.scores is None:
        return found
    return replace(found, objective=float(np.sum(found.scores)) + question.of.offset)


async def _occluded(
    extraction: AsyncExtraction, question: Question, options: methods.Occlusion, found: Attribution
) -> Attribution:
    """Run occlusion: forward passes only."""
    found = await _scored(extraction, question, found)
    if found.scores is None:
        raise ValueError("occlusion needs an objective of class scores, such as trocar.logit")
    places = windows(question.inputs.shape[1:], options.window, options.stride)
    baseline = baseline_array(options.baseline, question.inputs)
    parts = []
    for group in question.groups():
        per_batch = max(1, question.batch_size // (group.stop - group.start))
        batches = OccludedBatches(question.inputs[group], baseline[group], places, per_batch)
        parts.append(await occlusion_sum(extraction, question, group, batches, found.scores[group]))
    return replace(found, values=joined(parts).astype(np.float32))


def _names(categories: Sequence[str], classes: tuple[int, ...] | None) -> tuple[str, ...]:
    if not categories or classes is None:
        return ()
    return tuple(categories[number] if 0 <= number < len(categories) else "" for number in classes)


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
