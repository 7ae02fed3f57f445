"""Execution: requested options of passes, and the options used."""

from __future__ import annotations

from dataclasses import dataclass

from trocar._base.call_options import NUMERICS, PRIORITIES, CallOptions, Numerics, Priority
from trocar_api.v1 import execution_pb2 as pb
from trocar_api.value_words import not_one_of

_NAMES: dict[int, str] = {number: name for name, number in NUMERICS.items()}


@dataclass(frozen=True)
class Execution:
    """Execution options of a call's passes; checked on construction.

    Raises:
        ValueError: There are no such numerics, or no such priority.
    """

    numerics: Numerics | None = None
    """The loosest that will do; the model's default when None."""
    merge: bool = True
    """Whether a batch may run together with those of other calls."""
    cache: bool = True
    """Whether the reply may come from the server's feature cache, and go there."""
    priority: Priority = "normal"
    """Which of the caller's calls go first."""

    def __post_init__(self) -> None:
        if self.numerics is not None and self.numerics not in NUMERICS:
            raise ValueError(f"numerics {not_one_of(self.numerics, NUMERICS)}")
        if self.priority not in PRIORITIES:
            raise ValueError(f"priority {not_one_of(self.priority, PRIORITIES)}")

    def to_wire(self) -> pb.Execution | None:
        """Return the message; None when nothing was said."""
        if self == AS_USUAL:
            return None
        return pb.Execution(
            numerics=pb.NUMERICS_UNSPECIFIED if self.numerics is None else NUMERICS[self.numerics],
            merge=None if self.merge else False,
            cache=None if self.cache else False,
            priority=PRIORITIES[self.priority] if self.priority != "normal" else pb.PRIORITY_UNSPECIFIED,
        )


AS_USUAL = Execution()
"""What a caller who says nothing gets."""


def execution_of(how: CallOptions) -> Execution:
    """Return the options of the passes of a call."""
    return Execution(how.numerics, how.merge is not False, how.cache is not False, how.priority or "normal")


@dataclass(frozen=True)
class ExecutionInfo:
    """Execution options used by one pass."""

    numerics: str = "exact"
    """What the numbers are, at least as close as was asked for: "exact", "fast" or "bf16"."""
    engine: str = "eager"
    """What ran it: "eager", "torch", "openvino" or "cuda-graph"."""
    row_count: int = 0
    """The samples of the batch that it was run in, those of other calls included."""
    is_cached: bool = False
    """Whether nothing was computed: the reply came from the feature cache."""
    asked: str = "exact"
    """The loosest numbers that would have done: what the call asked for, or the model's default."""
    reason: str = ""
    """Why the numbers are closer than that: nothing faster is installed, not built yet, or does not keep the
    promise for this model. Empty where they are not."""
    stateful: bool = False
    """Whether the model keeps state from pass to pass in plain attributes: two equal passes at load differed.
    Each call starts from the state as loaded, as far as that is in the model's modules."""

    @classmethod
    def from_wire(cls, message: pb.ExecutionReport) -> ExecutionInfo:
        """Read them from a reply; an older server sends none, and is exact."""
        return cls(
            _NAMES.get(message.numerics, "exact"),
            message.engine or "eager",
            message.row_count,
            message.is_cached,
            _NAMES.get(message.asked, "exact"),
            message.reason,
            message.stateful,
        )


EAGER = ExecutionInfo()
"""A pass of eager PyTorch."""
