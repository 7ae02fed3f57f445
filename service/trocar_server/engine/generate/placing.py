"""Placing: which rows of a pass a tap collects, and which an edit changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import Collected, PassSpec
from trocar_server.engine.generate.edit_positions import at_rows, check_by_position
from trocar_server.engine.request.plan import EditRequest, Plan, TapRequest
from trocar_server.engine.resolve.edit_resolution import named
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.errors import ServiceError
from trocar_server.surgery import EditTarget, Surgery, Target
from trocar_server.surgery.axes.layout import TOKENS, UNKNOWN, tokens_dim_of
from trocar_server.surgery.recording.function_layouts import ATTENTION
from trocar_server.tensors.edits import mixed_dims

_PROBE = "edited: "
"""Before the names of edited values that are collected to see how many tokens they have."""
_FUSED_RANK = 4
"""Fused attention takes and returns (batch, heads, tokens, width)."""
Shapes = Mapping[str, Sequence[int] | None]
"""Shapes of values by name; None where it is not known."""
Chosen = Mapping[int, frozenset[int]]
"""By place in the request, the chosen positions of the text; without an entry all are."""


@dataclass(frozen=True)
class Span:
    """The positions of one pass.

    Attributes:
        first: The first.
        count: Their number.
    """

    first: int
    count: int

    def rows(self, chosen: frozenset[int] | None) -> list[int]:
        """Return the rows of the pass whose positions are chosen."""
        if chosen is None:
            return list(range(self.count))
        return [row for row in range(self.count) if self.first + row in chosen]


@dataclass(frozen=True)
class Placing:
    """The positions of a request's taps and edits.

    Attributes:
        taps: Of the taps.
        edits: Of the edits.
        prompt_count: The tokens of the prompt.
    """

    taps: Chosen = field(default_factory=dict)
    edits: Chosen = field(default_factory=dict)
    prompt_count: int = 0

    @classmethod
    def of(cls, plan: Plan, prompt_count: int, new_count: int) -> "Placing":
        """Resolve the positions of a plan for a prompt.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, a clause selects nothing.
        """
        return cls(
            _chosen("taps", plan.taps, prompt_count, new_count),
            _chosen("edits", plan.edits, prompt_count, new_count),
            prompt_count,
        )

    def check(self, resolved: Resolved) -> None:
        """Refuse edits that are no function of a position, and taps at positions that have no value.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, `EDIT_SHAPE_MISMATCH` or `EDIT_NOT_POSSIBLE`, naming the value.
        """
        for entry in resolved.surgery.edits:
            chosen = self.edits.get(entry.position)
            has_generated = chosen is None or any(place >= self.prompt_count for place in chosen)
            with named(entry.target.name):
                check_by_position(entry, has_positions=chosen is not None, has_generated=has_generated)

    def spec(self, spec: PassSpec, span: Span, wanted: Sequence[str], shapes: Shapes) -> PassSpec:
        """Return the specification of one pass: the values that it collects, the edits that it makes.

        Args:
            spec: Of a pass at all positions.
            span: The positions of the pass.
            wanted: The names of the values that it collects.
            shapes: Of the values in the pass of the prompt, by name.
        """
        targets = [target for target in spec.targets if target.name in wanted]
        if span.first:
            targets = [_of_one(target, shapes.get(target.name)) for target in targets]
        if spec.collects_only or (not self.edits and not span.first):
            return replace(spec, targets=targets)
        before, after = (
            tuple(_placed(entry, span, self.edits, shapes) for entry in entries)
            for entries in (spec.surgery.before, spec.surgery.after)
        )
        surgery = Surgery(
            tuple(entry for entry in before if entry is not None),
            tuple(entry for entry in after if entry is not None),
            inner=spec.surgery.inner,
        )
        made = {entry.target.name for entry in (*surgery.before, *surgery.after)}
        return replace(spec, targets=targets, surgery=surgery, due=spec.due & made)

    def probes(self, spec: PassSpec) -> list[Target]:
        """Return the values that the first pass of one token collects for `check_probes`."""
        return [
            replace(entry.target, name=_PROBE + entry.target.name, shape=None, view=(), clone=False)
            for entry in (*spec.surgery.before, *spec.surgery.after)
            if entry.target.parameter is None and self._needs_own_rows(entry)
        ]

    def _needs_own_rows(self, entry: EditTarget) -> bool:
        operation = entry.edit.operation
        return entry.position in self.edits or operation.at(1) != operation

    def check_probes(self, spec: PassSpec, collected: Collected) -> None:
        """Refuse edits of some positions of values that each pass computes anew for all positions.

        Args:
            spec: Of the pass.
            collected: What it returned.

        Raises:
            ServiceError: `EDIT_NOT_POSSIBLE`, naming the value.
        """
        for target in spec.targets:
            value, dim = collected.values.get(target.name), tokens_dim_of(target.layout)
            if (
                target.name.startswith(_PROBE)
                and value is not None
                and dim is not None
                and value.shape[dim] > 1
            ):
                raise ServiceError(
                    ErrorReason.EDIT_NOT_POSSIBLE,
                    f"'{target.name.removeprefix(_PROBE)}' is computed anew for all positions in each pass, "
                    "so an edit of some of them, or a random one, would not stay; edit another value",
                )

    def edited(self, spec: PassSpec, span: Span, collected: Collected) -> dict[int, tuple[int, int]]:
        """Return, for each edit that ran, the positions that it changed, and those that its gate left out.

        Args:
            spec: Of the pass.
            span: Its positions.
            collected: What it returned.
        """
        counts: dict[int, tuple[int, int]] = {}
        for entry in (*spec.surgery.before, *spec.surgery.after):
            if entry.target.parameter is None and entry.target.name not in collected.edited:
                continue
            first = _first_row(entry.target, collected.edited_shapes.get(entry.target.name), span)
            rows = [row for row in span.rows(self.edits.get(entry.position)) if row >= first]
            is_open = collected.opened.get(entry.position)
            changed = len(rows) if is_open is None else int(is_open[0, rows].sum())
            counts[entry.position] = max(counts.get(entry.position, (0, 0)), (changed, len(rows) - changed))
        return counts

    def collected(
        self, target: TapTarget, value: torch.Tensor, span: Span
    ) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return a collected value at the chosen positions, and the position of each of its rows.

        A value of the head has one row in the pass of the prompt, that of its last token.
        """
        dim = tokens_dim_of(target.target.layout)
        if dim is None:
            return value, ()
        if not span.first and value.shape[dim] > span.count:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"'{target.target.name}' has {value.shape[dim]:,} rows for {span.count:,} tokens, and none "
                "for each position; ask for it with `extract` on the finished text",
            )
        first = _first_row(target.target, tuple(value.shape), span)
        chosen = span.rows(self.taps.get(target.tap_index))
        if target.tap_index in self.taps and any(row < first for row in chosen):
            raise _missing(target.target.name, span.first + first)
        rows = [row for row in chosen if row >= first]
        positions = tuple(span.first + row for row in rows)
        if len(rows) == value.shape[dim]:
            return value, positions
        first = span.count - value.shape[dim]  # below 0 where keys of earlier positions are among them
        kept = torch.tensor([row - first for row in rows], dtype=torch.int64, device=value.device)
        return value.index_select(dim, kept), positions

    def wants(self, target: TapTarget, span: Span) -> bool:
        """Whether any position of a pass is chosen."""
        return bool(span.rows(self.taps.get(target.tap_index)))


def _chosen(
    name: str, entries: Sequence[TapRequest | EditRequest], prompt_count: int, new_count: int
) -> dict[int, frozenset[int]]:
    result: dict[int, frozenset[int]] = {}
    for index, entry in enumerate(entries):
        if entry.positions is None:
            continue
        try:
            chosen = entry.positions.of(prompt_count, new_count)
            if min(chosen) >= prompt_count + new_count - 1:
                raise ValueError(
                    f"it selects the last of {new_count} generated tokens, from which nothing is computed; "
                    "raise max_new_tokens by one, or use `extract` on the finished text"
                )
            result[index] = chosen
        except ValueError as error:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"{name}[{index}], '{entry.selector.text}': {error}",
                field=f"{name}[{index}].positions",
            ) from None
    return result


def _placed(entry: EditTarget, span: Span, edits: Chosen, shapes: Shapes) -> EditTarget | None:
    """Return an edit for the positions of a pass; None where it changes none of them."""
    rows, shape = span.rows(edits.get(entry.position)), shapes.get(entry.target.name)
    if not rows:
        return None
    if span.first and entry.target.parameter is None:
        operation = entry.edit.operation.at(span.first)
        entry = replace(
            entry, edit=replace(entry.edit, operation=operation), target=_edited_of_one(entry, shape)
        )
    return entry if len(rows) == span.count else replace(entry, edit=at_rows(entry.edit, rows, span.count))


def _edited_of_one(entry: EditTarget, shape: Sequence[int] | None) -> Target:
    """Return `_of_one` for an edit; in any shape where that makes no difference."""
    target, edit = _of_one(entry.target, shape), entry.edit
    is_whole = shape and edit.region.is_whole and not edit.operands
    if is_whole and not target.view and not mixed_dims(edit, shape or (), torch.float32):
        return replace(entry.target, shape=None)
    return target


def _of_one(target: Target, shape: Sequence[int] | None) -> Target:
    """Return a value of a function in a pass of one token, with its other dimensions as in the prompt's.

    Fused attention may have packed its heads, see Note: [Packed heads]; they are seen in their own dimension.

    Args:
        target: In the pass of the prompt.
        shape: Its shape there.
    """
    if target.kind != "fn" or not shape:
        return target
    if target.path == ATTENTION and len(shape) == _FUSED_RANK and target.picks in ((), (0,)):
        return replace(target, shape=None, view=(*shape[:2], 1, -1))
    if target.shape is not None:  # of an attention without fusion: (.., queries, keys)
        return replace(target, shape=(*shape[:-2], 1, -1))
    axes = (UNKNOWN,) * len(shape) if target.layout is None else target.layout.axes
    sizes = zip(shape, axes, strict=True)
    free = tuple(-1 if {TOKENS, UNKNOWN} & set(name.split("*")) else size for size, name in sizes)
    return replace(target, shape=free)


def _first_row(target: Target, shape: tuple[int, ...] | None, span: Span) -> int:
    """Return the first row of a pass that a value has: one of the head has the last alone."""
    dim = tokens_dim_of(target.layout)
    return 0 if dim is None or shape is None else max(0, span.count - shape[dim])


def _missing(name: str, first: int) -> ServiceError:
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"'{name}' has values from position {first} on, that of the last token of the prompt; choose from "
        "these, or ask for earlier ones with `extract` on the text",
    )
