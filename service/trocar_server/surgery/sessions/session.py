"""Session: a context manager whose hooks are registered all or not at all, and removed at its end."""

from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import ClassVar, Self


class Session(ABC):
    """Base class of the sessions of a pass.

        class Counting(Session):
            def _open(self) -> None:
                self._handles.callback(module.register_forward_hook(count).remove)

    Not thread-safe: hooks are state of the module, so the caller holds the replica's lease for as long as
    the session is open.
    """

    _ends_with: ClassVar[tuple[type[BaseException], ...]] = ()
    """Errors that end the context without an error."""

    _handles: ExitStack
    """Removals of the hooks; its own of each time that the context is entered."""

    @abstractmethod
    def _open(self) -> None:
        """Register the hooks; each with its removal in `_handles`."""

    def __enter__(self) -> Self:
        self._handles = ExitStack()
        try:
            self._open()
        except BaseException:
            self._handles.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        self._handles.close()
        return isinstance(error, self._ends_with)
