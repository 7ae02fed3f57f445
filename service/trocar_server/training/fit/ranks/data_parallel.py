"""Data parallelism of a fit: each batch is spread over ranks, as by DistributedDataParallel.

    parallel = DataParallel(core, base, teachers, 4, LocalLauncher(folder))
    parallel.prepare(PassGuard())
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

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock
from typing import Any

import structlog
import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.fit.ranks.rank_launch import RankJob, RankLauncher, RankLostError
from trocar_server.training.fit.ranks.rank_messages import (
    Shard,
    ShardResult,
    Verdict,
    problem_of,
    receive,
    send,
)
from trocar_server.training.fit.ranks.rank_worker import frozen_tensors, layout_of
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.in_backward import NonFiniteError
from trocar_server.training.step.step_result import StepResult
from trocar_server.training.step.training_pass import Scores
from trocar_server.training.step.update_rules import BatchPass

_CHECK_EVERY_S = 0.1
"""How often a wait for a worker looks at the guard."""
_log = structlog.get_logger("trocar")


class DataParallel:
    """Steps of a trainer on several ranks. See Note: [Ranks of a fit].

    Made on the thread that runs the trainer's passes.

    Args:
        core: The trainer, rank 0.
        base: The model that it started from.
        teachers: The models that its spec names, by id.
        ranks: Number of ranks, itself included; at least 2.
        launcher: Starts the others.
    """

    def __init__(
        self,
        core: TrainerCore,
        base: HostedModel,
        teachers: Mapping[str, HostedModel],
        ranks: int,
        launcher: RankLauncher,
    ) -> None:
        self._core, self._size, self._launcher = core, ranks, launcher
        # The number is one of the calling thread (OpenMP), and another thread may start the workers.
        self._job = RankJob(base, core.spec, dict(teachers), torch.get_num_threads())
        self._workers: Workers | None = None
        self._changing = Lock()
        self._loss_count = 0
        """Losses of workers since the last step that succeeded."""

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of the ranks from 1 that are on this machine; empty before the first step."""
        return self._workers.process_ids if self._workers else ()

    @property
    def is_ready(self) -> bool:
        """Whether the workers are there."""
        return self._workers is not None

    def room_problem(self) -> str:
        """Say why there can never be so many ranks; empty if there can."""
        return self._launcher.room_problem(self._size)

    def prepare(self, guard: PassGuard) -> None:
        """Start the workers, if they are not there; on any thread.

        Raises:
            ServiceError: `FIT_INVALID`, they cannot have the model; `SERVER_BUSY`, there is no room for them;
                `OUT_OF_MEMORY`, they ended twice.
            PassAborted: The guard stopped it.
        """
        with self._changing:
            while self._workers is None:
                try:
                    self._workers = Workers(self._launcher, self._job, self._core, self._size, guard)
                except RankLostError as error:
                    self._lose(error)

    def step(self, batch: Batch, guard: PassGuard) -> StepResult | None:
        """Process a batch as `TrainerCore.step`; its size is a multiple of the number of ranks.

        Returns:
            None if a worker was lost: nothing is changed, and the batch is to be stepped again.

        Raises:
            ServiceError: As `TrainerCore.step` and `prepare`; `OUT_OF_MEMORY`, workers ended twice.
        """
        self.prepare(guard)
        try:
            result = self._attempt(batch, guard)
        except RankLostError as error:
            self._lose(error)
            return None
        self._loss_count = 0
        return result

    def close(self) -> None:
        """End the workers."""
        with self._changing:
            if self._workers is not None:
                self._workers.close()
                self._workers = None

    def _lose(self, error: RankLostError) -> None:
        """Count a loss; the second one in a step fails it."""
        self._loss_count += 1
        if self._loss_count == 1:
            _log.warning("a worker of a fit was lost; its step runs again", why=str(error))
            return
        self._loss_count = 0
        raise ServiceError(
            ErrorReason.OUT_OF_MEMORY,
            f"workers of the fit ended twice in a step ({error}), often for lack of memory; the trainer "
            "is as before this step: use fewer workers or a smaller batch_size",
        ) from None

    def _attempt(self, batch: Batch, guard: PassGuard) -> StepResult:
        try:
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
    """The ranks from 1, as rank 0 speaks with them.

    Args:
        launcher: Starts them.
        job: What they build.
        core: The trainer, rank 0.
        size: Number of ranks, rank 0 included.
        guard: Stops the wait for them.

    Attributes:
        lost: Why a worker was lost; empty before.

    Raises:
        ServiceError: `FIT_INVALID`, they cannot build the model; `SERVER_BUSY`, there is no room for them.
        RankLostError: One of them ended.
    """

    def __init__(
        self, launcher: RankLauncher, job: RankJob, core: TrainerCore, size: int, guard: PassGuard
    ) -> None:
        self.lost = ""
        self._ranks = launcher.launch(job, size, guard)
        self._channels = self._ranks.channels
        try:
            self._check_built(layout_of(core, job.teachers), guard)
            try:
                self._group = self._ranks.join()
                if not self._ranks.has_weights:
                    self._group.copy_large_from_first(frozen_tensors(core, job.teachers))
            except (RuntimeError, OSError) as error:
                raise self._lose(first_line(error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Process ids of those on this machine, in the order of their ranks."""
        return self._ranks.process_ids

    def begin(self, shards: list[Shard], tensors: list[Tensor]) -> None:
        """Let them run shards, with the given weights and buffers."""
        self._send([shard.to_message() for shard in shards])
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
        return [ShardResult.of_message(message) for message in self._receive(guard)]

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
        self._ranks.close()

    def _check_built(self, layout: str, guard: PassGuard) -> None:
        for built in self._receive(guard):
            if problem := problem_of(built):
                raise ServiceError(*problem)
            if built["layout"] != layout:
                raise ServiceError(
                    ErrorReason.FIT_INVALID,
                    "workers: another node builds another model from the same configuration; install the "
                    "same versions and files on every node, or use one worker",
                )

    def _receive(self, guard: PassGuard) -> list[Any]:
        outcome = []
        for rank, channel in enumerate(self._channels, 1):
            try:
                while not channel.poll(_CHECK_EVERY_S):
                    guard.check()
                    if self._ranks.why_lost:
                        raise self._lose(self._ranks.why_lost)
                outcome.append(receive(channel))
            except (EOFError, OSError) as error:
                raise self._lose(f"rank {rank} ended") from error
        return outcome

    def _send(self, messages: list[Any]) -> None:
        for rank, (channel, message) in enumerate(zip(self._channels, messages, strict=True), 1):
            try:
                send(channel, message)
            except OSError as error:
                raise self._lose(f"rank {rank} ended") from error

    def _lose(self, why: str) -> RankLostError:
        self.lost = self._ranks.why_lost or why
        return RankLostError(self.lost)


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
