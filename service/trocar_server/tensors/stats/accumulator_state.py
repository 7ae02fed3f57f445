"""Accumulator state: serialised, so that it can be resumed. Loading validates every number.

The bytes are a safetensors file: named tensors, no code. One of them, `request`, identifies the statistics
and the version of this format.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256

import torch
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

VERSION = 1
MAX_COUNT = 1 << 53
"""The most elements of a group: beyond it float64 does not represent every integer."""

_REQUEST = "request"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "U8": torch.uint8}


def pack(request: str, tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Serialise tensors of the dtypes float64, float32 and int64.

    Args:
        request: Text that identifies the request: equal only for equal requests.
        tensors: By name.
    """
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save({**own, _REQUEST: _digest(request)})


class Unpacked:
    """The tensors of an untrusted state; each is taken once.

    Args:
        request: The request that the state must belong to.
        state: The bytes from `pack`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, not a state, or one for another request or version.
    """

    def __init__(self, request: str, state: bytes) -> None:
        try:
            entries = deserialize(state)  # type: ignore[no-untyped-call]  # safetensors 0.8 has no types
        except (SafetensorError, ValueError) as error:
            raise damaged("it cannot be read") from error
        self._entries = dict(entries)
        result = self.tensor(_REQUEST, (32,), torch.uint8)
        if not torch.equal(result, _digest(request)):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "the state belongs to other statistics, or was written by another version; start again "
                "without it",
            )

    @property
    def is_empty(self) -> bool:
        """Whether every tensor was taken."""
        return not self._entries

    def tensor(
        self, name: str, shape: Sequence[int | None], *dtypes: torch.dtype, finite: bool = False
    ) -> torch.Tensor:
        """Take a tensor.

        Args:
            name: Its name.
            shape: The required shape; None for any size.
            dtypes: The accepted dtypes.
            finite: Whether NaN and Inf are rejected.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it is missing or of another shape, dtype or content.
        """
        entry = self._entries.pop(name, None)
        if entry is None:
            raise damaged(f"'{name}' is missing in it")
        dtype, sizes, data = _DTYPES.get(entry["dtype"]), tuple(entry["shape"]), entry["data"]
        if dtype not in dtypes or not _fits(sizes, shape):
            raise damaged(f"'{name}' is {entry['dtype']} of shape {sizes}")
        if math.prod(sizes) == 0:
            return torch.empty(sizes, dtype=dtype)
        tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(sizes)
        if finite and not tensor.isfinite().all():
            raise damaged(f"'{name}' is not finite")
        return tensor

    def integers(self, name: str, size: int | None, low: int, high: int) -> list[int]:
        """Take a vector of integers, each from `low` to `high`.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it is missing, or a number is out of range.
        """
        numbers: list[int] = self.tensor(name, (size,), torch.int64).tolist()
        if not all(low <= number <= high for number in numbers):
            raise damaged(f"a number of '{name}' is out of range")
        return numbers


def damaged(problem: str) -> ServiceError:
    """Build the error for an invalid state."""
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"the state of the statistics is damaged: {problem}; start again without it",
    )


def _fits(sizes: Sequence[int], shape: Sequence[int | None]) -> bool:
    return len(sizes) == len(shape) and all(
        wanted is None or size == wanted for size, wanted in zip(sizes, shape, strict=True)
    )


def _digest(request: str) -> torch.Tensor:
    return torch.tensor(list(sha256(f"{VERSION} {request}".encode()).digest()), dtype=torch.uint8)
