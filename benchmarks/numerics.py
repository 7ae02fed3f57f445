"""The columns exact, fast and bf16: how each is asked for, and whether it can be had."""

import time
from collections.abc import Callable
from typing import Any

import trocar
from trocar._bench.case import NUMERICS
from trocar._bench.served import answer_of

_ENGINE_WAIT_S = 120
__all__ = ["NUMERICS", "options_of", "why_not"]


def options_of(numerics: str) -> dict[str, Any]:
    """Return what `extract` is given for these numerics, and so that no cache answers."""
    return {"numerics": numerics, "cache": False}


def why_not(numerics: str, call: Callable[..., trocar.FeatureMaps]) -> str:
    """Say why there is no figure for these numerics; nothing where there is one.

    An engine is built while exact passes answer: so the call is made until it is used.

    Args:
        numerics: What is asked for.
        call: Makes the call with such options.
    """
    if numerics == "exact":
        return ""
    limit, used = time.monotonic() + _ENGINE_WAIT_S, ""
    while time.monotonic() < limit:
        used = answer_of(call(**options_of(numerics))).numerics
        if used in (numerics, ""):
            return ""
    return f"{used} was used"
