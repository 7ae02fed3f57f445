"""Runs of a trainer on features that are kept: where its module is cut, and what goes into the tail.

runs = CachedRuns.prepare(core.module, load, plan, conditions)
for done, total in runs.fill(guard): ...
result = runs.run(indices, lambda batch: core.step(batch, guard))      # None: run the whole module
"""

from collections.abc import Callable, Collection, Generator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from trocar_server.errors import ServiceError, first_line
from trocar_server.surgery import PassGuard, parse_selector
from trocar_server.surgery.structure import leaves
from trocar_server.training.amp import autocast
from trocar_server.training.batch import Batch
from trocar_server.training.determinism import deterministic
from trocar_server.training.feature_cache import CachePlan, FeatureCache, Load, NoCacheError, is_bit_equal
from trocar_server.training.prefix import NoSplitError, Split, split_prefix
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.trial_run import undone

Result = TypeVar("Result")


@dataclass(frozen=True)
class Conditions:
    """How the module runs, and who else looks into it.

    Attributes:
        spec: The trainer's.
        device: The module's.
        has_gradients: Whether passes build a graph.
        needed: Modules that have to be called, because they are hooked.
        moving: Modules that change though they do not look like it.
    """

    spec: TrainerSpec
    device: torch.device
    has_gradients: bool
    needed: Collection[str] = ()
    moving: Collection[str] = ()

    def contexts(self) -> AbstractContextManager[object]:
        """Return what holds around a forward pass."""
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.has_gradients))
        stack.enter_context(deterministic(self.spec.deterministic))
        stack.enter_context(autocast(self.spec.precision, self.device))
        return stack


class CachedRuns:
    """A module that runs from the cut on.

    Args:
        module: The whole.
        split: Where it is cut.
        cache: Features of the samples.
        load: Returns samples as the whole takes them.
        conditions: How the module runs.
    """

    def __init__(
        self,
        module: nn.Module,
        split: Split,
        cache: FeatureCache,
        load: Load,
        conditions: Conditions,
    ) -> None:
        self._module, self._split, self._cache = module, split, cache
        self._load, self._conditions = load, conditions

    @property
    def description(self) -> str:
        """What is kept, for a person."""
        last = self._split.prefix_modules[-1]
        where = f", {self.disk_byte_count:,} of them on disk" if self.disk_byte_count else ""
        return f"what is frozen, up to '{last}', runs once: {self.byte_count:,} bytes{where}"

    def holds(self, indices: Tensor) -> bool:
        """Whether `run` can do such a batch."""
        return self._cache.holds(len(indices))

    @property
    def byte_count(self) -> int:
        """Bytes of what is kept."""
        return self._cache.byte_count

    @property
    def disk_byte_count(self) -> int:
        """Bytes of that on disk."""
        return self._cache.disk_byte_count

    @classmethod
    def prepare(cls, module: nn.Module, load: Load, plan: CachePlan, conditions: Conditions) -> "CachedRuns":
        """Cut a module.

        Raises:
            NoCacheError: There is no exact cut.
            ServiceError: The samples cannot be read.
        """
        # Of two sizes, and of no more samples than it takes: where to cut does not depend on them.
        arguments = _checked(load(torch.arange(3) % plan.count)).args
        other = _checked(load(torch.arange(2) % plan.count)).args
        try:
            with conditions.contexts():
                split = split_prefix(
                    module, arguments, other, needed=conditions.needed, moving=conditions.moving
                )
        except NoSplitError as error:
            raise NoCacheError(str(error)) from None
        except Exception as error:  # the model's own; a step on the same batch will tell it better
            raise NoCacheError(f"the model fails on a batch ({first_line(error)})") from error
        if split.overwrites and conditions.spec.optimizer.name == "lbfgs":
            raise NoCacheError("L-BFGS runs a batch several times, and the trained part overwrites its input")
        cache = FeatureCache(plan, split.prefix, load)
        return cls(module, split, cache, load, conditions)

    def fill(self, guard: PassGuard) -> Generator[tuple[int, int], PassGuard, None]:
        """Compute the features, a batch at a time; send the guard of each next one.

        Raises:
            NoCacheError: They cannot be kept.
            ServiceError: The samples cannot be read.
        """
        kept = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        units = self._cache.fill()
        while True:
            try:
                with self._conditions.contexts(), guard.watching(self._module):
                    done = next(units)
            except StopIteration:
                break
            except (NoCacheError, ServiceError):
                raise
            except Exception as error:  # as above
                raise NoCacheError(f"the frozen part fails on a batch ({first_line(error)})") from error
            guard = yield done
        if not all(is_bit_equal(buffer, before) for buffer, before in kept):
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
            raise NoCacheError("the frozen part changes its buffers")
        self._check_output()

    def run(self, indices: Tensor, work: Callable[[Batch], Result]) -> Result | None:
        """Do some work on a batch while the module runs from the cut on; None when it has no features."""
        batch = self._cache.batch(indices)
        if batch is None:
            return None
        with self._split.in_place_of(self._module):
            return work(batch)

    def close(self) -> None:
        """Free what is kept."""
        self._cache.close()

    def _check_output(self) -> None:
        """Compare the tail's output with the whole module's on one batch, bit by bit."""
        indices = self._cache.example()
        kept = self._cache.batch(indices)
        if kept is None:
            raise NoCacheError("there are no features for a whole batch")
        arguments = self._load(indices).args
        with self._conditions.contexts():
            with undone(self._module):
                whole = self._module(*arguments)
            with undone(self._module), self._split.in_place_of(self._module):
                tail = self._module(*kept.args)
        pairs = zip(_tensors(whole), _tensors(tail), strict=True)
        if not all(is_bit_equal(first, second) for first, second in pairs):
            raise NoCacheError("the output differs from that without a cache")


def needed_modules(module: nn.Module, spec: TrainerSpec) -> frozenset[str]:
    """Return the modules into which a trainer looks: values of losses, gradient rules, saved tensors.

    Raises:
        NoCacheError: A part of the spec needs the whole pass.
    """
    if any(term.teacher for term in spec.losses):
        raise NoCacheError("a teacher needs the inputs")
    texts = [term.selector for term in spec.losses if term.selector]
    texts += [rule.selector for rule in spec.gradient_rules if _is_of_values(rule.selector)]
    texts += [*spec.activation_checkpointing, *spec.saved_tensors.modules]
    return frozenset(path for text in texts for path in _paths(module, text))


def _is_of_values(text: str) -> bool:
    selector = parse_selector(text)
    return selector.is_gradient and selector.parameter is None


def _paths(module: nn.Module, text: str) -> list[str]:
    selector = parse_selector(text)
    if selector.kind not in ("module", "regex") or selector.order is not None:
        raise NoCacheError(f"'{text}' is found in the whole pass only")
    if not selector.path and selector.kind == "module":
        if selector.port.startswith("in"):
            raise NoCacheError(f"'{text}' is the model's input")
        return []
    paths = [path for path, part in module.named_modules() if selector.matches(path, type(part).__name__)]
    if not paths:
        raise NoCacheError(f"'{text}' is no module")
    return paths


def _checked(batch: Batch) -> Batch:
    if batch.kwargs or not batch.args or not all(isinstance(value, Tensor) for value in batch.args):
        raise NoCacheError("the model's inputs are not one tensor each")
    return batch


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]
