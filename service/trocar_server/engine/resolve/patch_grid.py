"""Patch grid: height and width of the patch tokens of a vision transformer, and its prefix tokens.

Both are read off the recorded pass: the patch embedding is a convolution whose output has one position for
each patch, and class and register tokens are parameters. Another number of tokens has no grid.
"""

import math
from dataclasses import replace

from trocar_server.engine.request.plan import TapRequest
from trocar_server.surgery import Leaf, Recording
from trocar_server.tensors.reductions import Grid

_PREFIX = frozenset(
    {
        *("cls_token", "class_token", "class_embedding", "dist_token", "distillation_token"),
        *("reg_token", "register_tokens"),
    }
)
"""Parameters of tokens before the patches, in timm, torchvision and transformers."""


def with_grid(tap: TapRequest, path: str, leaf: Leaf, recording: Recording) -> TapRequest:
    """Return a tap whose `Grid` without numbers has those of the model, where they are known."""
    if leaf.shape is None or len(leaf.shape) != 3 or Grid() not in tap.reductions:
        return tap
    found = _grid(path, leaf.shape[1], recording)
    if found is None:
        return tap
    return replace(tap, reductions=tuple(found if entry == Grid() else entry for entry in tap.reductions))


def _grid(path: str, token_count: int, recording: Recording) -> Grid | None:
    tower = _tower(path, recording)
    prefix = _prefix_count(tower, recording)
    for record in recording.modules.values():
        if record.type_name != "Conv2d" or not record.path.startswith(tower):
            continue
        shapes = [leaf.shape for call in record.calls for leaf in call.outputs if leaf.shape is not None]
        for shape in shapes:
            if len(shape) == 4 and prefix + shape[2] * shape[3] == token_count:
                return Grid(shape[2], shape[3], prefix)
    return None


def _tower(path: str, recording: Recording) -> str:
    """Return the start of the paths of the same tower, `vision_model.` of CLIP; empty where there is one."""
    first = path.split(".", maxsplit=1)[0]
    holds_patches = any(
        record.type_name == "Conv2d" and record.path.startswith(f"{first}.")
        for record in recording.modules.values()
    )
    return f"{first}." if holds_patches else ""


def _prefix_count(tower: str, recording: Recording) -> int:
    tokens = (
        leaf.shape
        for record in recording.modules.values()
        if f"{record.path}.".startswith(tower)
        for name, leaf in record.parameters.items()
        if name in _PREFIX and leaf.shape
    )
    return sum(math.prod(shape[:-1]) for shape in tokens)
