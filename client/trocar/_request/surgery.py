"""Surgery: edits, gradients and objective of a request, the parts beside its taps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trocar._request.edits import Edit
from trocar._request.objectives import Objective, as_objective
from trocar._request.operands import text
from trocar._request.stored.stored_edits import check_edits_name
from trocar_api.v1 import edit_pb2, objective_pb2


@dataclass(frozen=True)
class Surgery:
    """Edits, objective and sources of one request; made by `make_surgery`."""

    edits: tuple[str | Edit, ...] = ()
    """What is changed, in this order; a text names stored edits."""
    of: Objective | None = None
    """What gradients are taken of."""
    sources: Mapping[str, object] = field(default_factory=dict)
    """Other inputs by name, from whose passes swaps take values."""

    def wire_edits(self) -> list[edit_pb2.Edit]:
        """Return the edits as messages."""
        return [
            entry.to_wire() if isinstance(entry, Edit) else edit_pb2.Edit(stored=entry)
            for entry in self.edits
        ]

    def wire_objective(self) -> objective_pb2.Objective | None:
        """Return the objective as a message."""
        return None if self.of is None else self.of.to_wire()

    def payloads(self) -> list[memoryview]:
        """Return the bytes of the arrays of the edits, then of the objective; sources are not among them."""
        own = [payload for entry in self.edits if isinstance(entry, Edit) for payload in entry.payloads()]
        return own if self.of is None else [*own, *self.of.payloads()]

    @property
    def objective_offset(self) -> float:
        """What is added to the value of the objective that the server returns."""
        return 0.0 if self.of is None else self.of.offset


def make_surgery(
    edits: str | Edit | Iterable[str | Edit] = (),
    of: Objective | None = None,
    sources: Mapping[str, object] | None = None,
) -> Surgery:
    """Check edits, objective and sources of a call.

    Raises:
        TypeError: An edit or the objective is none, or a source has no name or no inputs.
        ValueError: A text cannot be the name of stored edits, or a source's name is empty.
    """
    if not isinstance(edits, (str, Edit, Iterable)):
        raise TypeError(f"edits is {edits!r}; create edits with trocar.edit, or leave them out")
    # Of a mapping the keys would pass for names.
    chosen: tuple[Any, ...] = (edits,) if isinstance(edits, (str, Edit, Mapping)) else tuple(edits)
    for entry in chosen:
        _check_edit(entry)
    for name, inputs in (sources or {}).items():
        text("the name of a source", name)
        if inputs is None:
            raise TypeError(f"the source {name!r} has no inputs")
    return Surgery(chosen, None if of is None else as_objective(of), sources or {})


def _check_edit(entry: object) -> None:
    if isinstance(entry, str):
        check_edits_name(entry)
    elif not isinstance(entry, Edit):
        raise TypeError(
            f"edits has {entry!r}; an edit is created with trocar.edit, or of a mapping with "
            "trocar.Edit.from_json, and a text names stored edits"
        )


NO_SURGERY = Surgery()
"""A pass as it is."""
