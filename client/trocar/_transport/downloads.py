"""Downloads: a file received in chunks, visible only when it is complete."""

from __future__ import annotations

from errno import EISDIR
from typing import TYPE_CHECKING

from trocar._base.replacement import open_replacement
from trocar.errors import BadReplyError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from trocar_api.v1.trainer_pb2 import ExportTrainerResponse


class Download:
    """Collects an export; a context, which leaves either the complete file or none.

    Attributes:
        byte_count: Bytes received.
        adapter_config: PEFT's configuration, of an adapter.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._expected: int | None = None
        self._update_count = 0
        self.byte_count = 0
        self.adapter_config = ""

    @property
    def is_complete(self) -> bool:
        """Whether every byte was received."""
        return self.byte_count == self._expected

    def __enter__(self) -> Self:
        if self._path.is_dir():
            raise IsADirectoryError(EISDIR, "is a folder; give a file", str(self._path))
        self._context = open_replacement(self._path, is_durable=True)
        self._file = self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)  # the file is closed before it gets its name

    def add(self, message: ExportTrainerResponse) -> None:
        """Add the next chunk.

        Raises:
            BadReplyError: The weights changed while a broken download was resumed.
        """
        if message.byte_count:
            self._begin(message.byte_count, message.update_count)
            self.adapter_config = message.adapter_config
        self._file.write(message.data)
        self.byte_count += len(message.data)

    def check(self) -> None:
        """Check that an ended call sent every byte.

        Raises:
            BadReplyError: It did not.
        """
        if not self.is_complete:
            raise BadReplyError(f"the file ended after {self.byte_count} of {self._expected} bytes")

    def _begin(self, expected: int, update_count: int) -> None:
        if self._expected is not None and (expected, update_count) != (self._expected, self._update_count):
            raise BadReplyError("the weights changed while they were exported; export them again")
        self._expected, self._update_count = expected, update_count
