"""Byte sizes as people write them, for both ends.

byte_count("256MiB")         # 268435456
byte_count(4096)             # 4096
"""

import re
from decimal import Decimal
from operator import index
from typing import Any

_BINARY = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS = {**_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)", re.ASCII)
_MOST_SHOWN = 40


def byte_count(value: Any, name: str = "the size") -> int:
    """Return a number of bytes.

    Args:
        value: A whole number, or a text such as "256MiB", "1.5GB" or "4096"; MiB are 2**20 bytes, MB 10**6.
        name: Its name in errors.

    Raises:
        TypeError: It is neither.
        ValueError: The text is no size.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name}: {value[:_MOST_SHOWN]!r} is not a size; write for example 256MiB")
        return int(Decimal(match[1]) * unit)
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(
        f"{name} is {value!r:.{_MOST_SHOWN}}; give a whole number of bytes, or a text such as '256MiB'"
    )
