"""Edits by position: an edit of a generated text is a function of the position that it changes.

# Note: [Edits by position]
The pass of the prompt has all of its tokens, each later pass has one. What counts tokens within a pass, such
as `tokens=[-1]` or an index, would therefore mean other positions with a cache than without one, and an
operation over several tokens would see others. Both are refused. What is left gives the same text either way,
unless it lets tokens see later ones: then those of the prompt see the prompt alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.resolve.edit_resolution import PlannedEdit
from trocar_server.errors import ServiceError
from trocar_server.surgery.axes.layout import TOKENS, UNKNOWN
from trocar_server.tensors.edits import Edit, Region, check_edit, mixed_dims, selected_dims
from trocar_server.tensors.reductions import Axis, TokenRows


def at_rows(edit: Edit, rows: Sequence[int], count: int) -> Edit:
    """Return an edit of some of the tokens of a pass.

    Args:
        edit: The edit, of all of them.
        rows: Which, from 0.
        count: The tokens of the pass.
    """
    tokens = TokenRows((tuple(row - count for row in rows),), count, (0,), is_from_end=True)
    return replace(edit, region=replace(edit.region, tokens=tokens))


def check_by_position(entry: PlannedEdit, *, has_positions: bool, has_generated: bool) -> None:
    """Refuse an edit that is no function of the position. See Note: [Edits by position].

    Args:
        entry: The edit.
        has_positions: Whether it has `positions=`.
        has_generated: Whether it may run at generated tokens.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `EDIT_SHAPE_MISMATCH` or `EDIT_NOT_POSSIBLE`.
    """
    edit, target = entry.request.edit, entry.target
    if target.parameter is not None:
        if has_positions:
            raise _refused(edit, "a parameter has no positions; leave positions= out")
        return
    shape, dtype = entry.leaf.shape or (), entry.leaf.dtype or torch.float32
    dims = _dims(entry, TOKENS)
    if selects_tokens(edit.region) or (dims | _dims(entry, UNKNOWN)) & selected_dims(edit, shape, dtype):
        raise _refused(
            edit,
            "tokens=, and an index or a mask that selects tokens, count in each pass, and after the prompt's "
            "each has one token; give positions=trocar.positions(...)",
        )
    if has_positions:
        check_edit(at_rows(edit, [0], shape[1] if len(shape) > 1 else 1), shape, dtype)
    if dims & mixed_dims(edit, shape, dtype):
        raise _refused(edit, "it reads several tokens at once, and after the prompt's each pass has one")
    if has_generated:
        own = {dim: place for place, dim in enumerate(sorted(dims))}
        later = [size + 1 if own.get(dim) else 1 if dim in own else size for dim, size in enumerate(shape)]
        check_edit(edit, later, dtype)


def selects_tokens(region: Region) -> bool:
    """Whether a region counts tokens itself."""
    return region.tokens is not None or any(take.axis is Axis.TOKENS for take in region.takes)


def _dims(entry: PlannedEdit, name: str) -> frozenset[int]:
    """Return the dimensions of a name; of a value of which nothing is known all are unknown."""
    layout = entry.target.layout
    names = [UNKNOWN] * len(entry.leaf.shape or ()) if layout is None else layout.axes
    return frozenset(dim for dim, own in enumerate(names) if name in own.split("*"))


def _refused(edit: Edit, problem: str) -> ServiceError:
    return ServiceError(ErrorReason.EDIT_NOT_POSSIBLE, f"{edit.operation}: {problem}")
