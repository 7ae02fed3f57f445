"""Sizes in bytes, as people write them."""

import re

from trocar._cli.failures import refuse

_BINARY = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS = {**_BINARY, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)")


def parse_size(text: str, option: str) -> int:
    """Read `256MiB`, `1.5GB` or a number of bytes.

    Raises:
        typer.BadParameter: It is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        refuse(f"{option}: {text!r} is no size; write for example 256MiB")
    return int(float(match[1]) * unit)
