"""Data parallelism of a fit: each batch is spread over ranks, as by DistributedDataParallel.

    parallel = DataParallel(core, base, teachers, ranks=4, scratch_dir=folder)
    result = parallel.step(batch, PassGuard())
    parallel.close()

# Note: [Ranks of a fit]
Rank 0 is the trainer itself; only it has an optimizer, a schedule, rules on sums and checkpoints. The other
ranks are processes that compute gradients and keep nothing: each step begins with rank 0's weights and
buffers and ends with the averages of the gradients at rank 0. DistributedDataParallel averages on every rank
and lets every rank update; the weights are the same. So a lost process costs the step that it was lost in:
the trainer rolls that step back, other processes begin, and the step runs again.

Rank r takes samples r, r + ranks, r + 2 * ranks, ... of a batch: what DistributedSampler gives it.
"""

import os
import pickle
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.rank_channel import RankGroup, receive, send
from trocar_server.training.fit.rank_worker import COMMAND, RankJob, Shard, ShardResult, Verdict
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.in_backward import NonFiniteError
from trocar_server.training.step.step_result import StepResult
from trocar_server.training.step.training_pass import Scores
from trocar_server.training.step.update_rules import BatchPass

_CHECK_EVERY_S = 0.1
"""How often a wait for a worker looks at the guard."""
_log = structlog.get_logger("trocar")


class RankLostError(Exception):
    """A worker ended, or could not be reached."""


class DataParallel:
    """Steps of a trainer on several ranks. See Note: [Ranks of a fit].

    Args:
        core: The trainer, rank 0.
        base: The model that it started from.
        teachers: The models that its spec names, by id.
        ranks: Number of ranks, itself included; at least 2.
        scratch_dir: Folder for the workers' spools.
    """

    def __init__(
        self,
        core: TrainerCore,
        base: HostedModel,
        teachers: Mapping[str, HostedModel],
        ranks: int,
        scratch_dir: Path,
    ) -> None:
        threads = max(1, torch.get_num_threads() // ranks)
        self._core, self._size = core, ranks
        self._job = RankJob(base, core.spec, dict(teachers), scratch_dir, threads)
        self._workers: Workers | None = None

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks from 1; empty before the first step."""
        return self._workers.process_ids if self._workers else ()

    def step(self, batch: Batch, guard: PassGuard) -> StepResult:
        """Process a batch as `TrainerCore.step`; its size is a multiple of the number of ranks.

        Raises:
            ServiceError: As `TrainerCore.step`; `OUT_OF_MEMORY`, workers ended twice.
        """
        try:
            return self._attempt(batch, guard)
        except RankLostError as error:
            _log.warning("a worker of a fit was lost; its step runs again", why=str(error))
        try:
            return self._attempt(batch, guard)
        except RankLostError as error:
            raise ServiceError(
                ErrorReason.OUT_OF_MEMORY,
                f"workers of the fit ended twice in a step ({error}), often for lack of memory; the trainer "
                "is as before this step: use fewer workers or a smaller batch_size",
            ) from None

    def close(self) -> None:
        """End the workers."""
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def _attempt(self, batch: Batch, guard: PassGuard) -> StepResult:
        try:
            if self._workers is None:
                self._workers = Workers(self._job, self._size, guard)
            with self._core.spreading(self._run):
                return self._core.step(batch, guard)
        except BaseException as error:
            # The core has converted the error; a worker's state after it is not known.
            lost = self._workers.lost if self._workers else ""
            is_lost = bool(lost) and isinstance(error, ServiceError)
            self.close()
            if is_lost:
                raise RankLostError(lost) from error
            raise

    def _run(self, own: BatchPass, batch: Batch, guard: PassGuard) -> tuple[Scores, Mapping[int, int]]:
        """Run a batch on all ranks; see `SpreadPass`."""
        workers, core = self._workers, self._core
        assert workers is not None
        shards = [shard_of(batch, rank, self._size) for rank in range(self._size)]
        seeds = (_seed(core.spec.seed, core.step_count, rank) for rank in range(1, self._size))
        workers.begin([Shard(*one) for one in zip(shards[1:], seeds, strict=True)], core.shared_tensors())
        first = _own_result(own, shards[0], guard, core)
        results = [first, *workers.results(guard)]
        for result in results:
            if result.problem is not None:
                raise ServiceError(*result.problem)
        wrong = next(filter(None, (result.not_finite for result in results)), "")
        workers.tell("drop" if wrong else "average")
        if wrong:
            raise NonFiniteError(wrong)
        workers.average(core.filled_gradients())
        core.drop_gradients(frozenset().union(*(result.collected for result in results)))
        return _mean(results)


class Workers:
    """The processes of the ranks from 1.

    Args:
        job: What they build.
        size: Number of ranks, rank 0 included.
        guard: Stops the wait for them.

    Attributes:
        lost: Why a worker was lost; empty before.

    Raises:
        ServiceError: `FIT_INVALID`, the model cannot be sent to another process.
        RankLostError: One of them ended.
    """

    def __init__(self, job: RankJob, size: int, guard: PassGuard) -> None:
        self.lost = ""
        job.scratch_dir.mkdir(parents=True, exist_ok=True)
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=job.scratch_dir))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._channels: list[Connection] = []
        try:
            for rank in range(1, size):
                self._start(rank, size)
            self._send_job(replace(job, scratch_dir=self._folder))  # spools are deleted with it
            for built in self.results(guard):
                if built.problem is not None:
                    raise ServiceError(*built.problem)
            self._group = self._joined(size)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Their process ids, in the order of their ranks."""
        return tuple(process.pid for process in self._processes)

    def begin(self, shards: list[Shard], tensors: list[Tensor]) -> None:
        """Let them run shards, with the given weights and buffers."""
        self._send(shards)
        try:
            self._group.copy_from_first(tensors)
        except RuntimeError as error:
            raise self._lose(first_line(error)) from error

    def results(self, guard: PassGuard) -> list[ShardResult]:
        """Wait for a message of each.

        Raises:
            RankLostError: One of them ended.
            PassAborted: The guard stopped the wait.
        """
        found = []
        for rank, channel in enumerate(self._channels, 1):
            try:
                while not channel.poll(_CHECK_EVERY_S):
                    guard.check()
                found.append(receive(channel))
            except (EOFError, OSError) as error:
                raise self._lose(f"rank {rank} ended") from error
        return found

    def tell(self, verdict: Verdict) -> None:
        """Say whether their gradients count."""
        self._send([verdict] * len(self._channels))

    def average(self, gradients: list[Tensor]) -> None:
        """Replace gradients of rank 0 by the averages over the ranks."""
        try:
            self._group.average_at_first(gradients)
        except RuntimeError as error:
            raise self._lose(first_line(error)) from error

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()  # they have nothing to save
        for process in self._processes:
            process.wait()
        for channel in self._channels:
            channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, rank: int, size: int) -> None:
        here, there = Pipe()
        self._channels.append(here)
        with there:
            arguments = [str(there.fileno()), str(self._folder), str(rank), str(size)]
            # The model's classes may come from folders that only this process was told of.
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-c", COMMAND, *arguments]
            self._processes.append(subprocess.Popen(command, pass_fds=[there.fileno()], env=environment))

    def _send_job(self, job: RankJob) -> None:
        try:
            self._send([job] * len(self._channels))
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ServiceError(
                ErrorReason.FIT_INVALID,
                f"workers: the model cannot be sent to another process ({first_line(error)}); use one worker",
            ) from error

    def _joined(self, size: int) -> RankGroup:
        try:
            return RankGroup(self._folder, 0, size)
        except RuntimeError as error:
            raise self._lose(first_line(error)) from error

    def _send(self, messages: list[Any]) -> None:
        for rank, (channel, message) in enumerate(zip(self._channels, messages, strict=True), 1):
            try:
                send(channel, message)
            except OSError as error:
                raise self._lose(f"rank {rank} ended") from error

    def _lose(self, why: str) -> RankLostError:
        self.lost = why
        return RankLostError(why)


def shard_of(batch: Batch, rank: int, size: int) -> Batch:
    """Return a rank's shard of a batch: every `size`-th sample from sample `rank` on.

    Raises:
        ServiceError: `INPUT_REJECTED`, the batch has parts that are not of samples.
    """

    def part(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: part(item) for name, item in value.items()}
        if isinstance(value, Tensor) and value.dim() and len(value) == batch.size:
            return value[rank::size].clone()  # a view would be sent with the whole batch
        if isinstance(value, (list, tuple)) and len(value) == batch.size:
            return value[rank::size]
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            "the batch has inputs or targets without a dimension of samples, so that it cannot be spread "
            "over workers; leave out `workers`",
        )

    return replace(
        batch,
        args=tuple(map(part, batch.args)),
        kwargs=part(batch.kwargs),
        targets=part(dict(batch.targets)),
        size=batch.size // size,
    )


def _own_result(own: BatchPass, shard: Batch, guard: PassGuard, core: TrainerCore) -> ShardResult:
    try:
        scores, changed = own(shard, guard)
    except NonFiniteError as error:
        return ShardResult(not_finite=str(error))
    return ShardResult(scores.loss, dict(scores.terms), dict(changed), frozenset(core.gradients()))


def _mean(results: list[ShardResult]) -> tuple[Scores, Mapping[int, int]]:
    """Return the mean of the losses and their terms, and the sums of the changed elements."""
    count = len(results)
    changed: Counter[int] = Counter()
    for result in results:
        changed.update(result.changed)
    terms = {name: sum(result.terms[name] for result in results) / count for name in results[0].terms}
    return Scores(sum(result.loss for result in results) / count, terms), changed


def _seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a rank's random numbers in a step; a function of the three alone."""
    return random.Random(f"{seed}/{step}/{rank}").getrandbits(63)
