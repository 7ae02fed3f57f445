"""Rank worker: the process of a rank of a data-parallel fit, other than rank 0.

It keeps nothing from one step to the next: each begins with the weights and buffers of rank 0, and ends when
its gradients are averaged there, or dropped. It ends when rank 0 closes its pipe.
"""

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.rank_channel import RankGroup, receive, send
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.in_backward import NonFiniteError


@dataclass(frozen=True)
class RankJob:
    """What a worker needs to build its copy of the trainer."""

    base: HostedModel
    spec: TrainerSpec
    teachers: dict[str, HostedModel]
    scratch_dir: Path
    """Parent of the spool's folder."""
    threads: int
    """Threads of torch."""


@dataclass(frozen=True)
class Shard:
    """A rank's part of a batch."""

    batch: Batch
    seed: int
    """Seed of the model's random numbers in this step."""


@dataclass(frozen=True)
class ShardResult:
    """Result of the forward and backward pass of a shard."""

    loss: float = float("nan")
    terms: dict[str, float] = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)
    """How many elements each gradient rule changed."""
    collected: frozenset[str] = frozenset()
    """Names of the parameters that have a gradient."""
    not_finite: str = ""
    """What was not finite; empty if everything was."""
    problem: tuple[ErrorReason, str] | None = None
    """Reason and message of the pass's failure."""


Verdict = Literal["average", "drop"]
"""Whether a shard's gradients count."""
COMMAND = f"from {__name__} import main; main()"
"""Python's `-c`: with `-m`, the classes of messages would be those of `__main__`."""


def serve(channel: Connection, folder: Path, rank: int, size: int) -> None:
    """Run shards until rank 0 closes the channel."""
    try:
        core = _built(receive(channel))
    except (EOFError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a model's classes may raise anything where they are imported
        what = f"workers: the model cannot be built in another process ({first_line(error)}); use one worker"
        send(channel, ShardResult(problem=(ErrorReason.FIT_INVALID, what)))
        return
    send(channel, ShardResult())
    group = RankGroup(folder, rank, size)
    while True:
        shard: Shard = receive(channel)
        group.copy_from_first(core.shared_tensors())
        send(channel, _result(core, shard))
        verdict: Verdict = receive(channel)
        if verdict == "average":
            group.average_at_first(core.filled_gradients())


def _built(job: RankJob) -> TrainerCore:
    torch.set_num_threads(job.threads)
    return TrainerCore(job.base, job.spec, job.teachers, job.scratch_dir)


def _result(core: TrainerCore, shard: Shard) -> ShardResult:
    try:
        scores, changed = core.run_shard(shard.batch, PassGuard(), shard.seed)
    except NonFiniteError as error:
        return ShardResult(not_finite=str(error))
    except ServiceError as error:
        return ShardResult(problem=(error.reason, error.message))
    return ShardResult(scores.loss, dict(scores.terms), dict(changed), frozenset(core.gradients()))


def main() -> None:
    """Run `COMMAND` with the arguments FD, FOLDER, RANK and SIZE."""
    descriptor, folder, rank, size = sys.argv[1:]
    channel = Connection(int(descriptor))
    with suppress(EOFError, OSError, KeyboardInterrupt):  # the fit has ended
        serve(channel, Path(folder), int(rank), int(size))
