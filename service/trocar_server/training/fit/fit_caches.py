"""Feature caches of a fit, for training and for evaluation, each where it is exact and worth its cost."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from trocar_server.surgery import PassGuard
from trocar_server.training.features.cached_runs import CachedRuns, Conditions, Result, needed_modules
from trocar_server.training.features.feature_cache import CachePlan, NoCacheError
from trocar_server.training.features.volatile_parts import moving_paths
from trocar_server.training.fit.augmentations import Augmentation
from trocar_server.training.fit.fit_data import Core, Reader
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.fit_spec import FitSpec


@dataclass(frozen=True)
class Progress:
    """Progress of filling the caches.

    Attributes:
        done: Samples in one of the caches.
        total: Samples that it will have.
        message: The outcome, once it is done.
    """

    done: int
    total: int
    message: str = ""


class FitCaches:
    """Features of the training set and of the evaluation set.

        caches = FitCaches(core, train, evaluation, spec, augmentation, folder)
        for progress in caches.fill(): ...
        result = caches.train(indices, lambda batch: core.step(batch, guard))

    Args:
        core: The trainer.
        train: The training data.
        evaluation: The evaluation data, or None.
        spec: The fit's spec.
        augmentation: Augmentation of training inputs.
        scratch_dir: Folder for features on disk.

    Attributes:
        why_not: Reasons for not caching, by `training` and `evaluation`; filled in by `fill`.
    """

    def __init__(
        self,
        core: Core,
        train: Reader,
        evaluation: Reader | None,
        spec: FitSpec,
        augmentation: Augmentation,
        scratch_dir: Path,
    ) -> None:
        self._core, self._spec, self._augmentation = core, spec, augmentation
        self._train, self._evaluation = train, evaluation
        self._scratch_dir = scratch_dir
        self._runs: dict[str, CachedRuns] = {}
        self.why_not: dict[str, str] = {}

    def fill(self) -> Generator[Progress, PassGuard, None]:
        """Fill the caches, one batch at a time; start with `next`, then send in the guard of each batch.

        Raises:
            ServiceError: The samples cannot be read.
        """
        guard = yield Progress(0, 0)
        guard = yield from self._fill_one("training", self._prepare_training, len(self._train), guard)
        if self._evaluation is not None:
            count = len(self._evaluation)
            yield from self._fill_one("evaluation", self._prepare_evaluation, count, guard)

    def train(self, indices: Tensor, work: Callable[[Batch], Result]) -> Result | None:
        """Call `work` on a training batch of features; None if the batch is not cached."""
        return self._runs["training"].run(indices, work) if "training" in self._runs else None

    def evaluate(self, indices: Tensor, work: Callable[[Batch], Result]) -> Result | None:
        """Call `work` on an evaluation batch of features; None if the batch is not cached."""
        return self._runs["evaluation"].run(indices, work) if "evaluation" in self._runs else None

    def announce_training(self, indices: Tensor) -> None:
        """Prefetch a training batch, if it has no cached features."""
        runs = self._runs.get("training")
        if runs is None or not runs.holds(indices):
            self._train.announce(indices)

    def announce_evaluation(self, indices: Tensor) -> None:
        """Prefetch an evaluation batch, if it has no cached features."""
        runs = self._runs.get("evaluation")
        if self._evaluation is not None and (runs is None or not runs.holds(indices)):
            self._evaluation.announce(indices)

    def close(self) -> None:
        """Free memory and disk."""
        for runs in self._runs.values():
            runs.close()
        self._runs.clear()

    def _fill_one(
        self, name: str, prepare: Callable[[], CachedRuns], count: int, guard: PassGuard
    ) -> Generator[Progress, PassGuard, PassGuard]:
        runs: CachedRuns | None = None
        try:
            runs = prepare()
            units = runs.fill(guard)
            done, total = next(units)
            while True:
                guard = yield Progress(done, total)
                done, total = units.send(guard)
        except StopIteration:
            pass
        except NoCacheError as error:
            if runs is not None:
                runs.close()
            self.why_not[name] = str(error)
            return (yield Progress(0, count, f"no features are stored for {name}: {error}"))
        assert runs is not None
        self._runs[name] = runs
        return (yield Progress(count, count, f"{name}: {runs.description}"))

    def _prepare_training(self) -> CachedRuns:
        self._check_worth()
        if self._spec.workers > 1:
            raise NoCacheError("the fit has several workers")
        if self._augmentation.is_random:
            raise NoCacheError("the augmentations are random")
        augmentation = self._augmentation or None
        spec = self._spec
        plan = self._plan(len(self._train), is_shuffled=spec.shuffle, drop_last=spec.drop_last)
        return CachedRuns.prepare(
            self._core.module,
            lambda indices: self._train.batch(indices, augmentation),
            plan,
            self._conditions(self._core.module, has_gradients=True),
        )

    def _prepare_evaluation(self) -> CachedRuns:
        reader = self._evaluation
        assert reader is not None
        self._check_worth()
        owners = {name.rpartition(".")[0] for name in self._core.trainable}
        moving = frozenset(owners | moving_paths(self._core.module).keys())
        plan = self._plan(len(reader), is_shuffled=False, drop_last=False)
        module = self._core.evaluated
        conditions = self._conditions(module, has_gradients=False, moving=moving)
        return CachedRuns.prepare(module, reader.batch, plan, conditions)

    def _check_worth(self) -> None:
        if self._spec.feature_cache.mode == "off":
            raise NoCacheError("it is turned off")
        if self._spec.epochs < 2:
            raise NoCacheError("there is only one epoch")
        if self._core.writes_itself:
            raise NoCacheError("the model keeps state or writes to its own tensors")

    def _plan(self, count: int, *, is_shuffled: bool, drop_last: bool) -> CachePlan:
        budget = self._spec.feature_cache
        used = [(runs.byte_count, runs.disk_byte_count) for runs in self._runs.values()]
        in_memory, on_disk = sum(all_ - disk for all_, disk in used), sum(disk for _, disk in used)
        return CachePlan(
            count=count,
            batch_size=self._spec.batch_size,
            epochs=self._spec.epochs,
            is_shuffled=is_shuffled,
            drop_last=drop_last,
            memory_bytes=max(0, budget.memory_bytes - in_memory),
            disk_bytes=max(0, budget.disk_bytes - on_disk),
            scratch_dir=self._scratch_dir,
        )

    def _conditions(
        self, module: nn.Module, *, has_gradients: bool, moving: frozenset[str] = frozenset()
    ) -> Conditions:
        device = next(module.parameters()).device
        needed = needed_modules(module, self._core.spec)
        return Conditions(self._core.spec, device, has_gradients, needed, moving)
