"""Attempts: retry limit and deadline of a call; knows failures, not the transport.

Calls that carry tensors are repeated by the client itself. Left to gRPC, messages were lost where a
connection broke while they were sent (grpcio 1.81): of 100 calls of 12 MiB through a network that broke every
second one, six were refused by the server as cut off.
"""

import math
import random
import time
from collections.abc import Callable

import grpc

from trocar._transport.rpc_errors import is_broken_connection
from trocar.errors import ServerBusyError

FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0
_LONGEST_BUSY_PAUSE_S, _JITTER = 10.0, 0.5


class Attempts:
    """The attempts at one call.

        attempts = Attempts(retries=4, timeout_s=60.0)
        while True:
            try:
                return call(timeout=attempts.remaining_s)
            except grpc.RpcError as error:
                problem = converted(error)
                pause_s = attempts.pause_after(problem, error)
                if pause_s is None:
                    raise problem from None
            pause(pause_s)

    Pauses begin with 0.1 s and double up to 2 s. A busy server sends a retry delay; up to half of it is
    added at random (jitter), so that clients rejected together do not retry together.

    Args:
        retries: Number of retries of a call.
        timeout_s: For all of them together, in seconds.
        returns_within_s: How long at least a server that has gone is retried, in seconds, whatever `retries`.
        resumes: Whether the next attempt resumes where the last one stopped. Then a call that the server
            cancels because it stops is a broken connection. Elsewhere a cancelled call stays cancelled, since
            this client's `close` may have done it.
        chance: A number from 0 to 1.
        began_at: When the first attempt began, as `time.monotonic()`; now when None.
    """

    def __init__(
        self,
        retries: int,
        timeout_s: float = math.inf,
        *,
        returns_within_s: float = 0.0,
        resumes: bool = False,
        chance: Callable[[], float] = random.random,
        began_at: float | None = None,
    ) -> None:
        self._retries = retries
        self._timeout_s = timeout_s
        self._returns_within_s = returns_within_s
        self._returns_until = 0.0
        self._resumes = resumes
        self._chance = chance
        self._deadline = (time.monotonic() if began_at is None else began_at) + timeout_s
        self._failures = 0

    def progress(self) -> None:
        """Reset the count of failures and the time: data was received, so the next failure is a new one."""
        self._deadline = time.monotonic() + self._timeout_s
        self._failures = 0

    @property
    def remaining_s(self) -> float:
        """Seconds that the next attempt may take; above 0."""
        return max(0.001, self._deadline - time.monotonic())

    def pause_after(self, problem: Exception, error: grpc.RpcError, *, is_slow: bool = False) -> float | None:
        """Count a failure, and return the pause before the next attempt, or None.

        Args:
            problem: The failure as an exception.
            error: The failure.
            is_slow: Whether it only timed out and may be resumed.
        """
        self._failures += 1
        if self._failures == 1:
            self._returns_until = time.monotonic() + self._returns_within_s
        if self._failures > self._retries and not self._returns(error):
            return None
        pause_s: float = min(FIRST_PAUSE_S * 2 ** (self._failures - 1), _LONGEST_PAUSE_S)
        if isinstance(problem, ServerBusyError):
            pause_s = pause_s if problem.retry_after_s is None else problem.retry_after_s
            if pause_s > _LONGEST_BUSY_PAUSE_S:
                return None
            pause_s *= 1 + _JITTER * self._chance()
        elif not (is_slow or self._is_broken(error)):
            return None
        return pause_s if pause_s < self.remaining_s else None

    def _returns(self, error: grpc.RpcError) -> bool:
        """Whether the server may be gone, and may still be back in time."""
        return time.monotonic() < self._returns_until and self._is_broken(error)

    def _is_broken(self, error: grpc.RpcError) -> bool:
        if error.code() is grpc.StatusCode.CANCELLED and not self._resumes:
            return False
        return is_broken_connection(error)
