"""Rank worker: the loop of a rank of a data-parallel fit, other than rank 0.

It keeps nothing from one step to the next: each begins with the weights and buffers of rank 0, and ends when
its gradients are averaged there, or dropped. It ends when rank 0 closes its channel.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.ranks.rank_group import RankGroup
from trocar_server.training.fit.ranks.rank_launch import RankJob
from trocar_server.training.fit.ranks.rank_messages import Shard, ShardResult, Verdict, receive, send
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.in_backward import NonFiniteError


@dataclass(frozen=True)
class RankModel:
    """A rank's copy of the trainer.

    Attributes:
        core: The trainer.
        teachers: The models that its spec names, by id.
        has_weights: Whether its frozen weights are those of rank 0 already.
    """

    core: TrainerCore
    teachers: Mapping[str, HostedModel]
    has_weights: bool


def build(job: RankJob, scratch_dir: Path, threads: int, *, has_weights: bool) -> RankModel:
    """Build a rank's copy of the trainer.

    Args:
        job: What to build it from.
        scratch_dir: Parent of the spool's folder.
        threads: Threads of torch.
        has_weights: See `RankModel`.
    """
    torch.set_num_threads(threads)
    core = TrainerCore(job.base, job.spec, job.teachers, scratch_dir)
    return RankModel(core, job.teachers, has_weights)


def serve(channel: Connection, built: Callable[[], RankModel], join: Callable[[], RankGroup]) -> None:
    """Run shards until rank 0 closes the channel.

    Args:
        channel: To rank 0.
        built: Takes the job and builds the copy of the trainer.
        join: Joins the process group.

    Raises:
        EOFError, OSError: Rank 0 has closed the channel.
        RuntimeError: Another rank is lost.
    """
    try:
        model = built()
    except (EOFError, OSError):
        raise
    except Exception as error:  # noqa: BLE001 - a model's classes may raise anything where they are imported
        what = f"workers: the model cannot be built in another process ({first_line(error)}); use one worker"
        send(channel, {"problem": (ErrorReason.FIT_INVALID, what)})
        return
    core = model.core
    send(channel, {"layout": layout_of(core, model.teachers)})
    group = join()
    if not model.has_weights:
        group.copy_large_from_first(frozen_tensors(core, model.teachers))
    while True:
        shard = Shard.of_message(receive(channel))
        group.copy_from_first(core.shared_tensors())
        send(channel, _result(core, shard).to_message())
        verdict: Verdict = receive(channel)
        if verdict == "average":
            group.average_at_first(core.filled_gradients())


def frozen_tensors(core: TrainerCore, teachers: Mapping[str, HostedModel]) -> list[Tensor]:
    """Return the memory of what a pass reads and training never changes, in the same order on every rank."""
    trained = {id(tensor) for tensor in core.shared_tensors()}
    modules = [core.module, *(teachers[name].module for name in sorted(teachers))]
    result = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return [tensor for tensor in result if id(tensor) not in trained]


def layout_of(core: TrainerCore, teachers: Mapping[str, HostedModel]) -> str:
    """Return a digest of the names, shapes and dtypes of all tensors: ranks must have the same."""
    digest = hashlib.sha256()
    for module in (core.module, *(teachers[name].module for name in sorted(teachers))):
        for name, tensor in _named(module):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()


def _named(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return chain(module.named_parameters(), module.named_buffers())


def _result(core: TrainerCore, shard: Shard) -> ShardResult:
    try:
        scores, changed = core.run_shard(shard.batch, PassGuard(), shard.seed)
    except NonFiniteError as error:
        return ShardResult(not_finite=str(error))
    except ServiceError as error:
        return ShardResult(problem=(error.reason, error.message))
    return ShardResult(scores.loss, dict(scores.terms), dict(changed), frozenset(core.gradients()))
