"""How passes may be run, and how one was run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from trocar_api.v1 import execution_pb2 as pb

Numerics: TypeAlias = Literal["exact", "fast", "bf16"]
Priority: TypeAlias = Literal["low", "normal", "high"]

NUMERICS: dict[str, pb.Numerics.ValueType] = {
    "exact": pb.NUMERICS_EXACT,
    "fast": pb.NUMERICS_FAST,
    "bf16": pb.NUMERICS_BF16,
}
_NAMES: dict[int, str] = {number: name for name, number in NUMERICS.items()}
_PRIORITIES: dict[str, pb.Priority.ValueType] = {
    "low": pb.PRIORITY_LOW,
    "normal": pb.PRIORITY_NORMAL,
    "high": pb.PRIORITY_HIGH,
}


@dataclass(frozen=True)
class Execution:
    """How the passes of a call may be run; checked when it is made.

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
            raise ValueError(f"numerics={self.numerics!r} is none of {', '.join(map(repr, NUMERICS))}")
        if self.priority not in _PRIORITIES:
            raise ValueError(f"priority={self.priority!r} is none of {', '.join(map(repr, _PRIORITIES))}")

    def to_wire(self) -> pb.Execution | None:
        """Return the message; None when nothing was said."""
        if self == AS_USUAL:
            return None
        return pb.Execution(
            numerics=pb.NUMERICS_UNSPECIFIED if self.numerics is None else NUMERICS[self.numerics],
            merge=None if self.merge else False,
            cache=None if self.cache else False,
            priority=_PRIORITIES[self.priority] if self.priority != "normal" else pb.PRIORITY_UNSPECIFIED,
        )


AS_USUAL = Execution()
"""What a caller who says nothing gets."""


@dataclass(frozen=True)
class ExecutionInfo:
    """How one pass was run."""

    numerics: str = "exact"
    """What the numbers are, at least as close as was asked for: "exact", "fast" or "bf16"."""
    engine: str = "eager"
    """What ran it: "eager", "torch", "openvino" or "cuda-graph"."""
    row_count: int = 0
    """The samples of the batch that it was run in, those of other calls included."""
    is_cached: bool = False
    """Whether nothing was computed: the reply came from the feature cache."""

    @classmethod
    def from_wire(cls, message: pb.ExecutionReport) -> ExecutionInfo:
        """Read what a reply says; an older server says nothing, and is exact."""
        return cls(
            _NAMES.get(message.numerics, "exact"),
            message.engine or "eager",
            message.row_count,
            message.is_cached,
        )


EAGER = ExecutionInfo()
"""A pass of eager PyTorch."""
