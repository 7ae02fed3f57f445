"""How often a call may be made, and until when; knows failures, not the transport.

Calls that carry tensors are repeated by the client itself. Left to gRPC, messages were lost where a
connection broke while they were sent (grpcio 1.81): of 100 calls of 12 MiB through a network that broke every
second one, six were refused by the server as cut off.
"""

import random
import time
from collections.abc import Callable

import grpc

from trocar._rpc_errors import is_broken_connection
from trocar.errors import ServerBusyError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_LONGEST_BUSY_PAUSE_S, _JITTER = 10.0, 0.5


class Attempts:
    """The attempts at one call.

        attempts = Attempts(retries=4, timeout_s=60.0)
        while True:
            try:
                return call(timeout=attempts.remaining_s)
            except grpc.RpcError as error:
                if not attempts.may_follow(error):
                    raise
            pause(attempts.pause_s)

    A busy server says when to come again; half as long again at the most is added by chance, so that those
    who were refused together do not come together.

    Args:
        retries: How often a call is tried again.
        timeout_s: For all of them together, in seconds.
        chance: A number from 0 to 1.
    """

    def __init__(self, retries: int, timeout_s: float, chance: Callable[[], float] = random.random) -> None:
        self._retries = retries
        self._chance = chance
        self._deadline = time.monotonic() + timeout_s
        self._failures = 0

    @property
    def remaining_s(self) -> float:
        """Seconds that the next attempt may take; above 0."""
        return max(0.001, self._deadline - time.monotonic())

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s: float = _FIRST_PAUSE_S * 2**self._failures
        return min(pause_s, _LONGEST_PAUSE_S)

    def pause_after(self, problem: Exception, error: grpc.RpcError) -> float | None:
        """Count a failure, and return how long to wait before the next attempt; None where there is none.

        Args:
            problem: What the failure means.
            error: The failure.
        """
        if not isinstance(problem, ServerBusyError):
            return self.pause_s if self.may_follow(error) else None
        pause_s = self.pause_s if problem.retry_after_s is None else problem.retry_after_s
        self._failures += 1
        if self._failures > self._retries or pause_s > _LONGEST_BUSY_PAUSE_S:
            return None
        pause_s *= 1 + _JITTER * self._chance()
        return pause_s if pause_s < self.remaining_s else None

    def may_follow(self, error: grpc.RpcError) -> bool:
        """Count a failure, and tell whether another attempt is allowed and makes sense."""
        self._failures += 1
        if self._failures > self._retries or self.remaining_s <= self.pause_s:
            return False
        # A call that was cancelled was cancelled by somebody: this client's `close`, or a server that stops.
        return error.code() is not grpc.StatusCode.CANCELLED and is_broken_connection(error)
