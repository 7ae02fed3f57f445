"""Base class of the accumulated parts of all statistics."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, NoReturn, Protocol, Self, TypeVar

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats.accumulator_state import Unpacked
from trocar_server.tensors.stats.groups import Grouped
from trocar_server.tensors.stats.statistic import Statistic


class Accumulated(Protocol):
    """Accumulated, immutable data of every group, for some statistics."""

    def to(self, device: torch.device) -> Self:
        """Return it on `device`."""
        ...

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Compute a statistic, float64; the numbers of one group are consecutive."""
        ...


K = TypeVar("K", bound=Accumulated)


def _cannot_pack(accumulated: object) -> Mapping[str, torch.Tensor]:
    raise _not_resumable()


def _cannot_unpack(state: Unpacked, groups: int, count: int) -> NoReturn:
    raise _not_resumable()


@dataclass(frozen=True)
class Topic(Generic[K]):
    """Functions that measure, merge and serialise one kind of accumulated data."""

    measure: Callable[[Grouped], K]
    """Takes a tensor; may raise `ServiceError`."""

    combine: Callable[[K, K], K]
    """Takes the data of two tensors, the newer one second. May raise `ServiceError`."""

    pack: Callable[[K], Mapping[str, torch.Tensor]] = _cannot_pack
    """Returns all data but the number of elements, as named tensors."""

    unpack: Callable[[Unpacked, int, int], K] = _cannot_unpack
    """Takes a state, the number of groups and of elements in each; may raise `ServiceError`."""


def _not_resumable() -> ServiceError:
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT, "statistics per sample have no state; each sample stands for itself"
    )
