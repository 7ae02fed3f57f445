"""Numerics: the columns exact, fast and bf16, with their execution options and availability."""

import time
from collections.abc import Callable
from typing import Any

import trocar
from trocar._bench.case import NUMERICS
from trocar._bench.served import answer_of

_ENGINE_WAIT_S = 600
_PAUSE_S = 1.0
"""Between calls: an engine is built with what they leave of the processors."""
__all__ = ["NUMERICS", "options_of", "why_not"]


def options_of(numerics: Any) -> dict[str, Any]:
    """Return the options of `extract` for these numerics, with the cache off."""
    return {"options": trocar.options(numerics=numerics, cache=False)}


def why_not(numerics: str, call: Callable[..., trocar.FeatureMaps]) -> str:
    """Return the reason for a missing figure of these numerics; empty if there is one.

    An engine is built while exact passes serve calls, so the call is repeated until the engine is used.

    Args:
        numerics: The requested numerics.
        call: Makes the call with such options.
    """
    if numerics == "exact":
        return ""
    limit, used = time.monotonic() + _ENGINE_WAIT_S, ""
    while time.monotonic() < limit:
        answer = call(**options_of(numerics))
        used = answer_of(answer).numerics
        if used in (numerics, ""):
            return ""
        if answer.execution.reason.startswith("no compiled pass qualified"):
            return answer.execution.reason
        time.sleep(_PAUSE_S)
    return f"{used} was used"
