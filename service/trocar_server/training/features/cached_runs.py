"""Cached runs: a trainer's tail, run on cached features of its frozen prefix.

runs = CachedRuns.prepare(core.module, load, plan, conditions)
for done, total in runs.fill(guard): ...
result = runs.run(indices, lambda batch: core.step(batch, guard))      # None: run the full module
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
from trocar_server.tensors.bits import same_bits
from trocar_server.training.features.feature_cache import (
    CachePlan,
    FeatureCache,
    Load,
    NoCacheError,
    positional_tensors,
)
from trocar_server.training.features.prefix import NoSplitError, Split, split_prefix
from trocar_server.training.features.trial_run import undone
from trocar_server.training.losses.batch import Batch
from trocar_server.training.model.amp import autocasting
from trocar_server.training.model.determinism import determinism
from trocar_server.training.spec.trainer_spec import TrainerSpec

Result = TypeVar("Result")


@dataclass(frozen=True)
class Conditions:
    """How the module runs, and which of its parts must be called.

    Attributes:
        spec: The trainer's spec.
        device: The module's device.
        has_gradients: Whether passes build a graph.
        needed: Modules that must be called, because they have hooks.
        moving: Modules that are volatile though `volatile_parts` does not detect it.
    """

    spec: TrainerSpec
    device: torch.device
    has_gradients: bool
    needed: Collection[str] = ()
    moving: Collection[str] = ()

    def contexts(self) -> AbstractContextManager[object]:
        """Return the contexts of a forward pass."""
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self.has_gradients))
        stack.enter_context(determinism(self.spec.deterministic)())
        stack.enter_context(autocasting(self.spec.precision, self.device)())
        return stack


class CachedRuns:
    """Runs of a module's tail on cached features.

    Args:
        module: The full module.
        split: The prefix and the tail.
        cache: Features of the samples.
        load: Returns samples as the full module takes them.
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
        """Description of the cache, for people."""
        last = self._split.prefix_modules[-1]
        where = f", {self.disk_byte_count:,} of them on disk" if self.disk_byte_count else ""
        return f"the frozen part, up to '{last}', runs once: {self.byte_count:,} bytes{where}"

    def holds(self, indices: Tensor) -> bool:
        """Whether the cache has features for such a batch."""
        return self._cache.holds(len(indices))

    @property
    def byte_count(self) -> int:
        """Bytes of the cached features."""
        return self._cache.byte_count

    @property
    def disk_byte_count(self) -> int:
        """Bytes of the cached features on disk."""
        return self._cache.disk_byte_count

    @classmethod
    def prepare(cls, module: nn.Module, load: Load, plan: CachePlan, conditions: Conditions) -> "CachedRuns":
        """Split a module.

        Raises:
            NoCacheError: There is no exact split.
            ServiceError: The samples cannot be read.
        """
        # Two batch sizes, with as few samples as possible: the split does not depend on the samples.
        arguments = positional_tensors(load(torch.arange(3) % plan.count))
        other = positional_tensors(load(torch.arange(2) % plan.count))
        try:
            with conditions.contexts():
                split = split_prefix(
                    module, arguments, other, needed=conditions.needed, moving=conditions.moving
                )
        except NoSplitError as error:
            raise NoCacheError(str(error)) from None
        except Exception as error:  # the model's own error; a step on the same batch reports it better
            raise NoCacheError(f"the model fails on a batch ({first_line(error)})") from error
        if split.overwrites and conditions.spec.optimizer.name == "lbfgs":
            raise NoCacheError("L-BFGS runs a batch several times, and the trained part overwrites its input")
        cache = FeatureCache(plan, split.prefix, load)
        return cls(module, split, cache, load, conditions)

    def fill(self, guard: PassGuard) -> Generator[tuple[int, int], PassGuard, None]:
        """Compute the features, a batch at a time; send in the guard of each next batch.

        Raises:
            NoCacheError: The features cannot be cached.
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
        if any(now is not buffer for now, (buffer, _) in zip(self._module.buffers(), kept, strict=True)):
            raise NoCacheError("the frozen part replaces its buffers")
        if not all(same_bits(buffer, before) for buffer, before in kept):
            with torch.no_grad():
                for buffer, before in kept:
                    buffer.copy_(before)
            raise NoCacheError("the frozen part changes its buffers")
        self._check_output()

    def run(self, indices: Tensor, work: Callable[[Batch], Result]) -> Result | None:
        """Call `work` on a batch while the module runs its tail only; None if the batch has no features."""
        batch = self._cache.batch(indices)
        if batch is None:
            return None
        with self._split.in_place_of(self._module):
            return work(batch)

    def close(self) -> None:
        """Free the cached features."""
        self._cache.close()

    def _check_output(self) -> None:
        """Compare the tail's output with the full module's on one batch, bit by bit."""
        indices = self._cache.example()
        kept = self._cache.batch(indices)
        if kept is None:
            raise NoCacheError("there are no features for a whole batch")
        arguments = positional_tensors(self._load(indices))
        with self._conditions.contexts():
            with undone(self._module):
                whole = self._module(*arguments)
            with undone(self._module), self._split.in_place_of(self._module):
                tail = self._module(*kept.args)
        pairs = zip(_tensors(whole), _tensors(tail), strict=True)
        if not all(same_bits(first, second) for first, second in pairs):
            raise NoCacheError("the output differs from that without a cache")


def needed_modules(module: nn.Module, spec: TrainerSpec) -> frozenset[str]:
    """Return the modules that a trainer observes or edits: for loss taps, all edits, saved tensors.

    Raises:
        NoCacheError: A part of the spec needs the full pass.
    """
    if any(term.teacher for term in spec.losses):
        raise NoCacheError("a teacher needs the model's inputs")
    texts = [term.selector for term in spec.losses if term.selector]
    ruled = [text for rule in spec.gradient_edits for text in (rule.selector, *rule.selectors)]
    texts += [text for text in ruled if _is_of_values(text)]
    texts += [edit.selector for edit in spec.edits]
    texts += [*spec.activation_checkpointing, *spec.saved_tensors.modules]
    return frozenset(path for text in texts for path in _paths(module, text))


def _is_of_values(text: str) -> bool:
    selector = parse_selector(text)
    return selector.is_gradient and selector.parameter is None


def _paths(module: nn.Module, text: str) -> list[str]:
    selector = parse_selector(text)
    if selector.kind not in ("module", "regex") or selector.order is not None:
        raise NoCacheError(f"'{text}' is available in a full pass only")
    if not selector.path and selector.kind == "module":
        if selector.port.startswith("in"):
            raise NoCacheError(f"'{text}' is the model's input")
        return []
    paths = [path for path, part in module.named_modules() if selector.matches(path, type(part).__name__)]
    if not paths:
        raise NoCacheError(f"'{text}' is not a module")
    return paths


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor)]
