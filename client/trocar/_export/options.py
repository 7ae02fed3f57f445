"""Export options of a data set."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from trocar._sources.source_opening import Decode
from trocar_api.value_words import not_one_of

if TYPE_CHECKING:
    from trocar._base.call_options import Numerics
    from trocar._request.edits import Edit

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
    column: str = ""
    """Which column of a table or dataset; the one with a usual name when empty."""
    max_tokens: int | None = None
    """The most tokens of one text; the model's maximum when None."""
    truncate: bool = False
    """Whether longer texts are cut."""

    @classmethod
    def of(
        cls,
        *,
        edits: "str | Edit | Sequence[str | Edit]" = (),
        restart: bool = False,
        flags: Mapping[str, bool | int | str] | None = None,
        **others: Any,
    ) -> "Options":
        """Return the options as arguments of `extract_dataset` name them.

        Raises:
            TypeError: An argument is unknown.
            ValueError: An option is out of range.
        """
        changes = (edits,) if isinstance(edits, str) or not isinstance(edits, Sequence) else tuple(edits)
        return cls(edits=changes, is_restart=restart, flags=dict(flags or {}), **others)

    def __post_init__(self) -> None:
        for name, allowed in (("format", FormatName), ("decode", Decode), ("on_error", OnError)):
            if getattr(self, name) not in get_args(allowed):
                raise ValueError(f"{name} {not_one_of(getattr(self, name), get_args(allowed))}")
        for name, value in (("batch", self.batch), ("shard_size", self.shard_size), ("limit", self.limit)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens} must be at least 1")
        if self.shard_size > MAX_SHARD_SIZE:
            raise ValueError(f"shard_size={self.shard_size} must be at most {MAX_SHARD_SIZE}")
