"""Caller of the current call: a context variable, set once per call, read wherever something has an owner.

A context variable, so that no lookup can omit it; unset, it is None and owns nothing.
"""

import re
from collections.abc import Callable
from contextvars import ContextVar

ANONYMOUS = "anonymous"
"""Principal of every caller without a token."""

_HASH = re.compile(r"[0-9a-f]{64}")

_current: ContextVar[str | None] = ContextVar("principal", default=None)
_flow: ContextVar[str] = ContextVar("flow", default="")
_is_operator: ContextVar[bool] = ContextVar("is_operator", default=False)


def is_unproven(principal: str) -> bool:
    """Whether a principal is the hash of an unverified token.

    One client can make any number of these, and no granted name looks like one (see
    `auth.grants.check_name`). A limit on how many of them store something must not affect callers with a name
    or without a token.
    """
    return _HASH.fullmatch(principal) is not None


current_principal: Callable[[], str | None] = _current.get
"""Returns the principal of the current call; None outside of calls."""

current_flow: Callable[[], str] = _flow.get
"""Returns the flow of the current call, the unit of fair scheduling; empty outside of calls.

The principal, if callers have names. Work that outlives a call, such as a fit, stays in its flow.
"""


is_operator: Callable[[], bool] = _is_operator.get
"""Whether the caller of the current call has the scope admin; on an open server every caller has it."""

set_operator: Callable[[bool], object] = _is_operator.set
"""Sets whether the caller has the scope admin, for the rest of the task."""

set_principal: Callable[[str], object] = _current.set
"""Sets the principal of the current call, for the rest of the task."""

set_flow: Callable[[str], object] = _flow.set
"""Sets the flow for the rest of the task."""
