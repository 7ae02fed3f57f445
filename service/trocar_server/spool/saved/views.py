"""Layout of a tensor in its stored bytes, restored with the same shape and strides.

# Note: [Strides decide about bits]
Kernels choose their way, and with it the order of a sum, by strides and by alignment to 64 bytes. So a tensor
comes back with the strides and the alignment that it had, also where only its own elements were kept.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

_ALIGNMENT = 64
_COMPACT_SHARE = 2


@dataclass(frozen=True, slots=True)
class View:
    """Layout of a tensor in a storage.

    Attributes:
        shape: Its sizes.
        strides: Its strides, in elements.
        offset: Its first element.
        dtype: What its elements are.
        is_conjugate: Whether torch takes the conjugate when it reads the elements.
        is_negative: Whether torch takes the negative.
        is_packed: Whether the storage has nothing but the distinct elements, row by row; then `strides` and
            `offset` say how they lay before.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_conjugate: bool = False
    is_negative: bool = False
    is_packed: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "View":
        """Describe a tensor within its storage."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def tensor(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor in a storage."""
        if self.is_packed:
            laid = self._spread(storage)
        else:
            laid = _laid(storage, self.dtype, self.offset, self.shape, self.strides)
        if self.is_conjugate:
            laid = laid.conj()
        return torch._neg_view(laid) if self.is_negative else laid  # pyright: ignore[reportPrivateImportUsage] - torch has no public one

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included."""
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """The sizes without what is expanded."""
        return tuple(size if stride else 1 for size, stride in zip(self.shape, self.strides, strict=True))

    def overlaps(self) -> bool:
        """Whether two elements may share memory, other than by being expanded."""
        reach = 0
        steps = zip(self.strides, self.distinct_shape, strict=True)
        for stride, size in sorted((stride, size) for stride, size in steps if size > 1):
            if stride <= reach:
                return True
            reach += (size - 1) * stride
        return False

    def _spread(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Put packed elements where they lay before: the memory between them is never read."""
        shape = self.distinct_shape
        packed = _laid(storage, self.dtype, 0, shape, _row_strides(shape))
        lead = self.offset % (_ALIGNMENT // self.dtype.itemsize)
        around = torch.empty(lead + self.span, dtype=self.dtype, device=storage.device)
        around.as_strided(shape, self.strides, lead).copy_(packed)
        return around.as_strided(self.shape, self.strides, lead)


@dataclass(frozen=True, slots=True)
class Part:
    """A small part of a storage that is stored alone.

    Attributes:
        view: How the tensor lies in the part.
        byte_count: The part's size.
        where: Says which part of the storage it is.
        copy: Makes the part, a storage of its own.
    """

    view: View
    byte_count: int
    where: tuple[object, ...]
    copy: Callable[[], torch.UntypedStorage]


def small_part(view: View, storage: torch.UntypedStorage) -> Part | None:
    """Return the part of a storage that a tensor needs; None where it is no less than half of it."""
    most = storage.nbytes() / _COMPACT_SHARE
    item_bytes = view.dtype.itemsize
    first = view.offset * item_bytes // _ALIGNMENT * _ALIGNMENT
    last = (view.offset + view.span) * item_bytes
    if last - first < most:
        moved = replace(view, offset=view.offset - first // item_bytes)
        return Part(moved, last - first, (first, last), lambda: copied_bytes(storage, first, last - first))
    shape = view.distinct_shape
    byte_count = math.prod(shape) * item_bytes
    if byte_count >= most or view.overlaps():
        return None
    where = (view.offset, shape, view.strides, view.dtype)
    lying = view.offset, shape, view.strides
    return Part(
        replace(view, is_packed=True),
        byte_count,
        where,
        lambda: (
            _laid(storage, view.dtype, *lying).clone(memory_format=torch.contiguous_format).untyped_storage()
        ),
    )


def copied_bytes(storage: torch.UntypedStorage, first: int, count: int) -> torch.UntypedStorage:
    """Return a copy of some bytes of a storage."""
    return _laid(storage, torch.uint8, first, (count,), (1,)).clone().untyped_storage()


def _laid(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


def _row_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))
