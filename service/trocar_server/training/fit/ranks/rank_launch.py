"""Launch of ranks: what starts the processes of the ranks from 1, and how rank 0 reaches them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.ranks.rank_group import RankGroup
from trocar_server.training.spec.trainer_spec import TrainerSpec


class RankLostError(Exception):
    """A worker ended, or could not be reached."""


@dataclass(frozen=True)
class RankJob:
    """What ranks build their copy of the trainer from.

    Attributes:
        base: The model that the trainer started from.
        spec: The trainer's spec.
        teachers: The models that the spec names, by id.
        threads: Threads of torch at rank 0, for its passes.
    """

    base: HostedModel
    spec: TrainerSpec
    teachers: Mapping[str, HostedModel]
    threads: int


class Ranks(Protocol):
    """The started processes of the ranks from 1."""

    @property
    def channels(self) -> Sequence[Connection]:
        """Channels to them, in the order of their ranks."""
        ...

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of those on this machine, in the order of their ranks."""
        ...

    @property
    def has_weights(self) -> bool:
        """Whether they have the frozen weights of rank 0 already."""
        ...

    @property
    def why_lost(self) -> str:
        """The reason why a rank was lost, if its process or host tells it; empty otherwise."""
        ...

    def join(self) -> RankGroup:
        """Form the process group; they join it at the same time.

        Raises:
            OSError, RuntimeError: One of them is lost.
        """
        ...

    def close(self) -> None:
        """End them; a second call does nothing."""
        ...


class RankLauncher(Protocol):
    """Starts ranks."""

    def room_problem(self, size: int) -> str:
        """Say why there can never be so many ranks, rank 0 included; empty if there can."""
        ...

    def launch(self, job: RankJob, size: int, guard: PassGuard) -> Ranks:
        """Start the ranks from 1 and let them build their copies of the trainer.

        Args:
            job: What they build.
            size: Number of ranks, rank 0 included.
            guard: Stops the wait for them.

        Raises:
            ServiceError: `FIT_INVALID`, the model cannot be sent to them; `SERVER_BUSY`, there is no room.
            RankLostError: One of them ended.
            PassAborted: The guard stopped the wait.
        """
        ...
