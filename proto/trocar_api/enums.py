"""Enum names: the values of a wire enum by the names that people write.

numbers(pb.PoolKind)      # {"avg": pb.POOL_KIND_AVG, ...} of POOL_KIND_UNSPECIFIED, POOL_KIND_AVG, ...
"""

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import _EnumTypeWrapper

Value = TypeVar("Value", bound=int)


def numbers(enum: "_EnumTypeWrapper[Value]") -> dict[str, Value]:
    """Return an enum's values but the unspecified one by name, in lower case and without the enum's own."""
    prefix = enum.Name(enum.values()[0]).removesuffix("UNSPECIFIED")
    return {name.removeprefix(prefix).lower(): value for name, value in enum.items() if value}
