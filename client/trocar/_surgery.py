"""What is changed in a pass, and what gradients are taken of: the parts of a request beside its taps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trocar._edits import Edit
from trocar._inputs import Inputs
from trocar._objectives import Objective, as_objective
from trocar._operands import text
from trocar._stored_edits import check_edits_name
from trocar_api.v1 import edit_pb2, objective_pb2

Edits: TypeAlias = str | Edit | Sequence[str | Edit]
"""Edits, and names of stored ones."""


@dataclass(frozen=True)
class Surgery:
    """Edits, objective and sources of one request."""

    edits: Edits = ()
    """What is changed, in this order."""
    of: Objective | None = None
    """What gradients are taken of."""
    sources: Mapping[str, Inputs] | None = None
    """Other inputs by name, from whose passes swaps take values."""

    def __post_init__(self) -> None:
        if self.of is not None:
            as_objective(self.of)
        for entry in self._edits:
            if not isinstance(entry, (str, Edit)):
                raise TypeError(
                    f"edits has {entry!r}; an edit is made with trocar.edit, a text is the name of stored ones"
                )
            if isinstance(entry, str):
                check_edits_name(entry)
        for name, inputs in self.named_sources().items():
            text("the name of a source", name)
            if inputs is None:
                raise TypeError(f"the source {name!r} has no inputs")

    @property
    def _edits(self) -> Sequence[str | Edit]:
        return [self.edits] if isinstance(self.edits, (str, Edit)) else self.edits

    def wire_edits(self) -> list[edit_pb2.Edit]:
        """Return the edits as messages."""
        return [
            entry.to_wire() if isinstance(entry, Edit) else edit_pb2.Edit(stored=entry)
            for entry in self._edits
        ]

    def wire_objective(self) -> objective_pb2.Objective | None:
        """Return the objective as a message."""
        return None if self.of is None else self.of.to_wire()

    def named_sources(self) -> Mapping[str, Inputs]:
        """Return the sources; none when they are None."""
        return self.sources or {}

    def payloads(self) -> list[memoryview]:
        """Return the bytes of the arrays of the edits, then of the objective; sources are not among them."""
        own = [payload for entry in self._edits if isinstance(entry, Edit) for payload in entry.payloads()]
        return own if self.of is None else [*own, *self.of.payloads()]

    @property
    def objective_offset(self) -> float:
        """What is added to the value of the objective that the server returns."""
        return 0.0 if self.of is None else self.of.offset


NO_SURGERY = Surgery()
"""A pass as it is."""
