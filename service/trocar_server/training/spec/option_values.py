"""Option values: numeric checks."""

import sys
from typing import Any


def is_number(value: Any) -> bool:
    """Whether a value is a number that a float can represent, and not a bool."""
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and bool(abs(value) <= sys.float_info.max)  # False for NaN, too


def is_whole(value: Any, least: int, most: int = 1 << 53) -> bool:
    """Whether a value is an integer within these limits."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
