"""Priority of a request within its caller's flow."""

from enum import IntEnum, unique


@unique
class Priority(IntEnum):
    """Order of items within one flow."""

    LOW = -1
    NORMAL = 0
    HIGH = 1
