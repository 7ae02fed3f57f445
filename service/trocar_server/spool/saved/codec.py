"""Codec: a user's pair of functions around what a spool stores, and the tensors made by it.

class Halves:
    def pack(self, tensor):
        return tensor.half(), tensor.dtype

    def unpack(self, packed):
        halves, dtype = packed
        return halves.to(dtype)

spool = Spool("/scratch", budget_bytes=256 << 20, codec=Halves())
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.saved.saved import Packed, Watch
from trocar_server.spool.spool_errors import CodecError


class Codec(Protocol):
    """Encodes saved tensors, and decodes them: casts, sparsification, encryption.

    Called in the thread of forward or backward, without gradients, for tensors that the spool may write: not
    for parameters, those of `keep`, those that `choose` leaves out, and those under `min_bytes`. An error
    that a method raises comes out of forward or backward as it is.
    """

    def pack(self, tensor: torch.Tensor) -> Any:
        """Encode a tensor, which must not be changed; returns the value to store.

        A tensor, or a tuple of tensors, tuples and anything else. Its tensors are budgeted, written and read
        like saved tensors; what is no tensor, or within something other than tuples, stays in memory as it
        is. Called once for a tensor that several operations save.
        """
        ...

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return a tensor of the shape, dtype and device of that which `pack` was given.

        May be called several times with what `pack` returned, in which every tensor has the same elements.
        """
        ...


def check_codec(codec: object) -> None:
    """Check that a codec has its methods.

    Raises:
        TypeError: It has not.
    """
    missing = [name for name in ("pack", "unpack") if not callable(getattr(codec, name, None))]
    if codec is not None and missing:
        lacks = "none of them" if len(missing) == 2 else f"no {missing[0]}"
        raise TypeError(f"codec needs the methods pack and unpack; {type(codec).__name__} has {lacks}")


@dataclass(eq=False)
class Coded:
    """The encoded value of one tensor at one version, shared by all its saves.

    Attributes:
        packed: As the codec returned it, with packed tensors in the place of tensors.
        origin: Keeps the address of the tensor's storage from being used again.
    """

    packed: Any
    origin: StorageWeakRef


class SavedCoded:
    """A saved tensor that a codec has encoded."""

    __slots__ = ("_codec", "_coded", "_device", "_dtype", "_shape", "_watch")

    def __init__(self, codec: Codec, coded: Coded, tensor: torch.Tensor, watch: Watch) -> None:
        self._codec, self._coded, self._watch = codec, coded, watch
        self._shape, self._dtype, self._device = tuple(tensor.shape), tensor.dtype, tensor.device

    def unpack(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            SavedTensorChangedError: It was changed in place since.
            SpoolError: What the codec made of it cannot be brought back from disk.
            CodecError: The codec returned something else.
        """
        self._watch.check(self._shape)
        with torch.no_grad():
            result = self._codec.unpack(_unpacked(self._coded.packed))
        return self._watch.counted(self._checked(result))

    def _checked(self, outcome: object) -> torch.Tensor:
        expected = f"a tensor of {self._dtype}, shape {list(self._shape)}, on {self._device}"
        if not isinstance(outcome, torch.Tensor):
            raise CodecError(
                f"the codec's unpack returned {type(outcome).__name__}; autograd saved {expected}"
            )
        if (tuple(outcome.shape), outcome.dtype, outcome.device) != (self._shape, self._dtype, self._device):
            is_found = f"{outcome.dtype}, shape {list(outcome.shape)}, on {outcome.device}"
            raise CodecError(f"the codec's unpack returned a tensor of {is_found}; autograd saved {expected}")
        return outcome.detach()


def _unpacked(packed: Any) -> Any:
    """Return what the codec returned, with its tensors."""
    if type(packed) is tuple:
        return tuple(_unpacked(entry) for entry in packed)
    return packed.unpack() if isinstance(packed, Packed) else packed
