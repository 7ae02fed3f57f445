"""Export options of a data set."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from trocar._sources.source_opening import Decode

if TYPE_CHECKING:
    from trocar._request.edits import Edit
    from trocar._request.execution import Numerics

FormatName = Literal["safetensors", "zarr", "parquet", "npy"]
OnError = Literal["stop", "skip"]

MAX_SHARD_SIZE = 100_000
"""The keys of a shard are in its header, and safetensors reads no header over 100 MB."""


@dataclass(frozen=True)
class Options:
    """Options of a run; most are part of the output's description, see `description`."""

    format: FormatName = "safetensors"
    batch: int = 16
    """Samples in one pass; the last digits of values depend on it."""
    shard_size: int = 10_000
    """The most samples in one shard; a batch that is larger is a shard of its own."""
    decode: Decode = "server"
    on_error: OnError = "stop"
    limit: int | None = None
    """How many samples to take; all when None."""
    is_restart: bool = False
    timeout_s: float | None = None
    """Deadline of each call, in seconds; the client's when None."""
    edits: "tuple[str | Edit, ...]" = ()
    """What is changed in every pass, in this order; names are those of stored edits."""
    numerics: "Numerics" = "exact"
    """The loosest numbers that will do."""
    adapter: str = ""
    """The caller's LoRA adapter that every pass runs with."""
    flags: Mapping[str, bool | int | str] = field(default_factory=dict)
    """Flags of the forward, by name."""

    def __post_init__(self) -> None:
        for name, allowed in (("format", FormatName), ("decode", Decode), ("on_error", OnError)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not one of {', '.join(get_args(allowed))}"
                )
        for name, value in (("batch", self.batch), ("shard_size", self.shard_size), ("limit", self.limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.shard_size > MAX_SHARD_SIZE:
            raise ValueError(f"shard_size={self.shard_size} must be at most {MAX_SHARD_SIZE}")
