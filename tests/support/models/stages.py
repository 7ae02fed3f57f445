"""Stages of torchvision's models, found in passes of them."""

import inspect
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torchvision.models import get_model_builder

from trocar_server.models import Family, family_of, make_meta_replica
from trocar_server.models.stages import stages_of
from trocar_server.models.weights.initial_values import no_initial_values
from trocar_server.surgery import Leaf, Recording, parse_selector, record_calls, resolve

SIDE = 224


def recorded_by_name(architecture: str) -> Recording:
    """Record a pass of a torchvision model, on the meta device but for detection, with its stages."""
    family = family_of(architecture)
    builder = get_model_builder(architecture)
    arguments: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        arguments["weights_backbone"] = None
    if architecture.removeprefix("quantized_") in ("googlenet", "inception_v3"):
        arguments["init_weights"] = False
    if family is Family.DETECTION:
        recording = record_calls(builder(**arguments).eval(), [[torch.rand(3, 64, 64)]], is_symbolic=False)
    else:
        shape = (1, 3, 16, SIDE, SIDE) if family is Family.VIDEO else (1, 3, SIDE, SIDE)
        model, image = _on_meta(builder, arguments), torch.zeros(shape, device="meta")
        # Batch normalization keeps the shape, and is half of a pass on the meta device.
        with patch.object(functional, "batch_norm", lambda values, *_, **__: values.clone()):
            recording = record_calls(model, [image])
    return replace(recording, stages=stages_of(architecture))


def stage_leaves(recording: Recording) -> dict[str, Leaf]:
    """Return what every stage stands for.

    Raises:
        ValueError: A stage's name, or its selector, stands for anything but one tensor, or for another.
    """
    found = {}
    for stage, meaning in recording.stages.items():
        by_name, by_meaning = resolve([parse_selector(stage), parse_selector(meaning)], recording)
        if len(by_name) != 1 or by_name != by_meaning:
            raise ValueError(f"{stage} is {by_name}, {meaning} is {by_meaning}")
        found[stage] = by_name[0][1]
    return found


def _on_meta(builder: Any, arguments: dict[str, Any]) -> torch.nn.Module:
    try:
        with torch.device("meta"), no_initial_values():
            return builder(**arguments).eval()  # type: ignore[no-any-return]
    except NotImplementedError:  # RegNet computes its widths with tensors
        return make_meta_replica(builder(**arguments).eval())
