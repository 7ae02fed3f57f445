"""What callers of a server that is killed again and again share: where it is, and what went wrong."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import trocar
from tests.support.killing.moments import Moments

_BUSY = (trocar.errors.ServerBusyError,)


class Caller(Protocol):
    """Works with a server, and knows what it acknowledged."""

    name: str
    """Its token: what it stores is its own."""

    def work(self, client: trocar.Client) -> None:
        """Do one thing; whatever the server has acknowledged is noted."""

    def check(self, client: trocar.Client) -> None:
        """After a restart, while nobody works: look whether what was acknowledged is there.

        Raises:
            AssertionError: It is not.
        """


class World:
    """Lets callers work while a server lives, and holds them while it does not."""

    def __init__(self) -> None:
        self.moments = Moments()
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._changed = threading.Condition()
        self._address: str | None = None
        self._ends = False
        self._working = 0

    def open(self, address: str) -> None:
        """Let callers work with a server."""
        with self._changed:
            self._address = address
            self._changed.notify_all()

    def close(self) -> None:
        """Expect the server's end: from now on calls may fail."""
        with self._changed:
            self._address = None

    def wait_until_idle(self) -> None:
        """Return when no caller works any more."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._working == 0, 120)

    def end(self) -> None:
        """Let callers go."""
        with self._changed:
            self._ends, self._address = True, None
            self._changed.notify_all()

    def is_open(self, address: str) -> bool:
        """Whether callers may work with a server."""
        return self._address == address

    def blame(self, caller: Caller, error: BaseException) -> None:
        """Note what should not have happened."""
        self.wrong.append(f"{caller.name}: {type(error).__name__}: {error}")

    @contextmanager
    def expects(self, caller: Caller, address: str) -> Iterator[None]:
        """Let calls fail where the server may be dead, and note other failures."""
        try:
            yield
        except _BUSY:
            pass
        except trocar.TrocarError as error:
            if self.is_open(address):
                self.blame(caller, error)
        except Exception as error:  # noqa: BLE001 - whatever else happens is a defect, of the server or of this
            self.blame(caller, error)

    def run(self, caller: Caller) -> None:
        """Work until the end."""
        while (address := self._next()) is not None:
            try:
                with trocar.connect(address, token=caller.name, retries=0, timeout_s=60) as client:
                    while self.is_open(address) and not self.wrong:
                        with self.expects(caller, address):
                            caller.work(client)
                        self.done[caller.name] += 1
            finally:
                with self._changed:
                    self._working -= 1
                    self._changed.notify_all()

    def check(self, caller: Caller, address: str) -> None:
        """Let a caller look whether all is there."""
        with trocar.connect(address, token=caller.name, timeout_s=60) as client:
            try:
                caller.check(client)
            except (AssertionError, trocar.TrocarError) as error:
                self.blame(caller, error)

    def _next(self) -> str | None:
        """Wait for a server; None at the end, or where something is wrong."""
        with self._changed:
            self._changed.wait_for(lambda: self._address is not None or self._ends)
            if self._ends:
                return None
            self._working += 1
            return self._address
