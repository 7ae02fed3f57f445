"""Room: the part of a call's reservation that its processed inputs take, and how much that may be."""

from dataclasses import dataclass

from trocar_server.config import Limits
from trocar_server.engine.schedule.admission import Reservation


@dataclass
class Room:
    """What processing and decoding reserve; see `Reservation.reserve` for the options.

        room = Room(reservation)
        room.reserve(counted_bytes, rows)         # before it is made
        room.settle(counted_bytes, made_bytes)    # once it is
        room.give_back()                          # if it failed

    Args:
        reservation: The call's; None for work without one: a dry run, and the batches of a fit.
        kept_bytes: As for `reserve`, as is `may_overdraw`.
        may_overdraw: See there.
    """

    reservation: Reservation | None = None
    kept_bytes: int | None = None
    may_overdraw: bool = False
    byte_count: int = 0

    def most_bytes(self, limits: Limits) -> int:
        """Return the most bytes that the inputs may become."""
        own = limits.most_made_bytes
        return own if self.reservation is None else min(own, self.reservation.most_bytes)

    def reserve(self, byte_count: int, rows: int = 1) -> None:
        """Reserve bytes before they are made.

        Raises:
            ServiceError: `REQUEST_TOO_LARGE`, they never fit; `SERVER_BUSY`, they do not fit now.
        """
        if self.reservation is not None:
            kept_bytes = None if self.kept_bytes is None else self.kept_bytes + self.byte_count
            self.reservation.reserve(byte_count, rows, kept_bytes=kept_bytes, may_overdraw=self.may_overdraw)
            self.byte_count += byte_count

    def settle(self, counted_bytes: int, made_bytes: int, rows: int = 1) -> None:
        """Replace bytes that were counted by those that were made.

        Raises:
            ServiceError: As `reserve`, they are more.
        """
        if made_bytes > counted_bytes:
            self.reserve(made_bytes - counted_bytes, rows)
        else:
            self.release(counted_bytes - made_bytes)

    def release(self, byte_count: int) -> None:
        """Release some of the bytes."""
        if self.reservation is not None:
            self.reservation.add(-byte_count)
            self.byte_count -= byte_count

    def give_back(self) -> None:
        """Release all of them."""
        self.release(self.byte_count)
