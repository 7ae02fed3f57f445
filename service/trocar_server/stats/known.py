"""What all knowledge about a tensor has in common, whatever the statistic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, Self, TypeVar

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.stats.groups import Grouped
from trocar_server.stats.state import Unpacked
from trocar_server.stats.statistic import Statistic


class Known(Protocol):
    """What is known of every group about some statistics; never changed, only replaced."""

    def to(self, device: torch.device) -> Self:
        """Return it on `device`."""
        ...

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Turn it into numbers, float64; those of one group come together."""
        ...


K = TypeVar("K", bound=Known)


def _cannot_pack(known: object) -> Mapping[str, torch.Tensor]:
    raise _not_resumable()


def _cannot_unpack(state: Unpacked, groups: int, count: int) -> NoReturn:
    raise _not_resumable()


@dataclass(frozen=True)
class Topic(Generic[K]):
    """How one kind of knowledge is gained: a set of functions that belong together."""

    measure: Callable[[Grouped], K]
    """Takes a tensor; may raise `ServiceError`."""

    combine: Callable[[K, K], K]
    """Takes what is known of two tensors; what is new comes second. May raise `ServiceError`."""

    pack: Callable[[K], Mapping[str, torch.Tensor]] = _cannot_pack
    """Returns all that is known, beside the number of elements, as named tensors."""

    unpack: Callable[[Unpacked, int, int], K] = _cannot_unpack
    """Takes a state, how many groups there are and elements in each; may raise `ServiceError`."""


def _not_resumable() -> ServiceError:
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT, "statistics per sample have no state; each sample stands for itself"
    )
