"""Disk options of a spool."""

from dataclasses import dataclass, field

from trocar_server.spool.files.encoding import EncodingOptions


@dataclass(frozen=True)
class DiskOptions:
    """Limits and encoding of blocks on disk.

    Attributes:
        quota_bytes: The most bytes of files, their headers included; None for no limit.
        checksum: Whether what is read is compared with a checksum of what was written.
        encoding: Allowed encodings of the bytes.
    """

    quota_bytes: int | None = None
    checksum: bool = False
    encoding: EncodingOptions = field(default_factory=EncodingOptions)

    def __post_init__(self) -> None:
        if self.quota_bytes is not None and self.quota_bytes < 0:
            raise ValueError("quota_bytes cannot be negative")

    def notes(self) -> list[str]:
        """Return the notes on these options for a report."""
        if self.encoding.store_dtype is None:
            return []
        return [
            f"store_dtype={self.encoding.store_dtype}: saved tensors on disk lose precision, and so do "
            "gradients"
        ]
