"""Part of the sync client: generated from _aio_attribution.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trocar._attribution import cam, methods
from trocar._attribution.attribution import Attribution
from trocar._attribution.inputs import array_input, baseline_array, check_input
from trocar._attribution.objectives import INPUT, OUTPUT, classes_of, predicted
from trocar._attribution.occlusion import OccludedBatches, windows
from trocar._attribution.path import (
    convergence_delta,
    joined,
)
from trocar._attribution.question import Question
from trocar._client_passes import (
    GRADIENT,
    VALUE,
    combined,
    conducted,
    integrated,
    occlusion_sum,
    smoothed,
    taps_at,
)
from trocar._concurrency import sync_compute
from trocar._edits import edit
from trocar._taps import tap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._attribution.scaling import Floats
    from trocar._client_extraction import Extraction
    from trocar._edits import Edit
    from trocar._feature_maps import FeatureMaps
    from trocar._inputs import Inputs
    from trocar._objectives import Objective
    from trocar._taps import Tap


def attribute(
    client: Extraction,
    model_id: str,
    inputs: Inputs,
    method: str,
    options: methods.Options,
    of: Objective | None,
    at: str,
    batch_size: int,
) -> Attribution:
    """Do the work of `AsyncAttributions.attribute`."""
    model = client.model(model_id)
    question, scores = _question(client, model_id, inputs, of, batch_size)
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
    return _answered(client, question, options, found)


def _question(
    client: Extraction, model_id: str, inputs: Inputs, of: Objective | None, batch_size: int
) -> tuple[Question, Floats | None]:
    """Return what is asked, and the scores of the inputs as far as this needed a pass.

    A pass is needed for images, as attributions are of the model's own input, and for predicted classes.
    """
    values = array_input(inputs)
    if values is not None and of is not None:
        return Question(model_id, check_input(values), of, batch_size), None
    taps = [] if of is not None else [tap(OUTPUT, alias=VALUE)]
    if values is None:
        taps.append(tap(INPUT, alias="input"))
    try:
        maps = client.extract(model_id, inputs if values is None else check_input(values), taps)
    except Exception as error:
        if of is None:
            error.add_note("while looking for the predicted class; of= says what to attribute instead")
        raise
    if values is None:
        values = maps["input"]
    question = Question(model_id, values, of or predicted(maps[VALUE]), batch_size)
    return question, None if of is not None else question.scores({"score0": maps[VALUE]})


def _answered(
    client: Extraction, question: Question, options: methods.Options, found: Attribution
) -> Attribution:
    match options:
        case methods.IntegratedGradients():
            values = integrated(client, question, options)
            return _on_path(client, question, options, replace(found, values=values))
        case methods.LayerConductance():
            values = conducted(client, question, options, found.at)
            return _on_path(client, question, options, replace(found, values=values))
        case methods.SmoothGrad():
            values = smoothed(client, question, options, found.at)
            return _scored(client, question, replace(found, values=values))
        case methods.Occlusion():
            return _occluded(client, question, options, found)
        case methods.GradCam():
            return _cam(client, question, options, found)
        case _:
            return _gradient(client, question, options, found)


def _gradient(
    client: Extraction, question: Question, options: methods.Options, found: Attribution
) -> Attribution:
    """Run saliency, input x gradient or guided backpropagation: one pass."""
    edits: list[Edit] = []
    if isinstance(options, methods.GuidedBackprop):
        relus = [options.relus] if isinstance(options.relus, str) else options.relus
        edits = [edit(f"{selector}/grad_out", "clamp", low=0.0) for selector in relus]
    has_value = isinstance(options, methods.InputXGradient)
    try:
        maps, found = _one_pass(client, question, found, taps_at(found.at, has_value), edits)
    except Exception as error:
        if edits:
            error.add_note("guided_backprop clamps gradients at modules of type ReLU; relus= names others")
        raise
    return replace(found, values=combined(maps, options))


def _cam(client: Extraction, question: Question, options: methods.GradCam, found: Attribution) -> Attribution:
    maps, found = _one_pass(client, question, found, taps_at(found.at, True))
    value, gradient = (
        cam.channels_first(maps[name], options.channel_dim, options.grid) for name in (VALUE, GRADIENT)
    )
    is_plus_plus = isinstance(options, methods.GradCamPlusPlus)
    combine = cam.grad_cam_plus_plus if is_plus_plus else cam.grad_cam
    values = sync_compute(combine, value, gradient)
    return replace(found, values=values.astype(np.float32), is_map=True)


def _one_pass(
    client: Extraction,
    question: Question,
    found: Attribution,
    taps: Sequence[Tap],
    edits: Sequence[Edit] = (),
) -> tuple[FeatureMaps, Attribution]:
    """Take gradients of the whole batch at once, and the scores with them."""
    wanted = question.score_taps() if found.scores is None else []
    maps = client.extract(question.model_id, question.inputs, [*taps, *wanted], edits=edits, of=question.of)
    scores = question.scores(maps) if wanted else found.scores
    return maps, replace(found, scores=scores, objective=maps.objective)


def _on_path(
    client: Extraction,
    question: Question,
    options: methods.IntegratedGradients | methods.LayerConductance,
    found: Attribution,
) -> Attribution:
    """Add the scores, and how far the attributions are from their difference."""
    found = _scored(client, question, found)
    if not options.delta:
        return found
    if found.scores is None:
        raise ValueError("delta needs an objective of class scores, such as trocar.logit")
    baseline = baseline_array(options.baseline, question.inputs)
    maps = client.extract(question.model_id, np.ascontiguousarray(baseline), question.score_taps())
    start = question.scores(maps)
    assert start is not None  # as the scores of the inputs are there
    return replace(found, delta=convergence_delta(found.values, np.asarray(found.scores, np.float64), start))


def _scored(client: Extraction, question: Question, found: Attribution) -> Attribution:
    """Add the scores of the inputs, where they can be computed."""
    if found.scores is None and question.score_taps():
        maps = client.extract(question.model_id, question.inputs, question.score_taps())
        found = replace(found, scores=question.scores(maps))
    if found.scores is None:
        return found
    return replace(found, objective=float(np.sum(found.scores)) + question.of.offset)


def _occluded(
    client: Extraction, question: Question, options: methods.Occlusion, found: Attribution
) -> Attribution:
    """Run occlusion: forward passes only."""
    found = _scored(client, question, found)
    if found.scores is None:
        raise ValueError("occlusion needs an objective of class scores, such as trocar.logit")
    places = windows(question.inputs.shape[1:], options.window, options.stride)
    baseline = baseline_array(options.baseline, question.inputs)
    parts = []
    for group in question.groups():
        per_batch = max(1, question.batch_size // (group.stop - group.start))
        batches = OccludedBatches(question.inputs[group], baseline[group], places, per_batch)
        parts.append(occlusion_sum(client, question, group, batches, found.scores[group]))
    return replace(found, values=joined(parts).astype(np.float32))


def _names(categories: Sequence[str], classes: tuple[int, ...] | None) -> tuple[str, ...]:
    if not categories or classes is None:
        return ()
    return tuple(categories[number] if 0 <= number < len(categories) else "" for number in classes)
