"""One forward and backward pass of a trainer: from a batch to gradients, with all that is around it."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.recordings import record_example
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, stages_for
from trocar_server.surgery import PassGuard, Recording
from trocar_server.surgery.gradient_rules import GradientRule, GradientRuleSession
from trocar_server.training.activation_checkpointing import activation_checkpointing
from trocar_server.training.amp import autocast
from trocar_server.training.backward_guard import BackwardGuard
from trocar_server.training.batch import Batch
from trocar_server.training.in_backward import NonFiniteError
from trocar_server.training.loss_targets import Shape
from trocar_server.training.loss_values import known_shapes
from trocar_server.training.losses import LossFunction, main_output
from trocar_server.training.parameters import select_modules
from trocar_server.training.regularizers import Penalties
from trocar_server.training.rules import make_rules
from trocar_server.training.saved_tensors import SavedTensors
from trocar_server.training.spec import LossSpec, TrainerSpec
from trocar_server.training.teachers import make_teachers
from trocar_server.training.watched_values import WatchedValues


@dataclass(frozen=True)
class Scores:
    """The loss of a batch and its terms."""

    loss: float
    terms: Mapping[str, float]


class TrainingPass:
    """Runs batches forward and backward; gradients are left at the parameters.

    Args:
        module: The trainer's tree.
        spec: What is wanted.
        trained: Its parameters by name.
        hosted: The trainer's model as others see it, for recordings.
        teachers: Hosted models by id.
        saved: Where saved tensors lie.

    Raises:
        ServiceError: A selector of the spec does not fit the model.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: TrainerSpec,
        trained: Mapping[str, nn.Parameter],
        hosted: HostedModel,
        teachers: Mapping[str, HostedModel],
        saved: SavedTensors,
    ) -> None:
        stages = stages_for(hosted.spec)
        record = cache(lambda: replace(record_example(hosted)[1], stages=stages))
        self._module, self._spec, self._saved = module, spec, saved
        self._device = hosted.device
        self._loss = LossFunction(spec.losses)
        self._shapes = _Shapes(spec.losses, record, hosted.input_shape)
        self._penalties = Penalties(spec.regularizers, trained, module)
        self._watched = WatchedValues(self._loss.selectors, record)
        self._teachers = make_teachers(self._loss.teachers, teachers)
        self._rules: tuple[GradientRule, ...] = ()
        if spec.gradient_rules:
            self._rules = _copying(make_rules(spec.gradient_rules, module, record(), tuple(trained)))
        paths = select_modules(module, spec.activation_checkpointing, "activation_checkpointing", stages)
        self._guarded = BackwardGuard(module)
        self._recomputed = {path: module.get_submodule(path) for path in paths}

    def run(self, batch: Batch, guard: PassGuard) -> tuple[Scores, Mapping[int, int]]:
        """Run a batch forward and backward.

        Returns:
            The loss, and the number of elements that each gradient rule changed.

        Raises:
            NonFiniteError: The loss is not finite; the backward pass was not begun.
            ServiceError: `TARGET_REJECTED`; `TRAINER_INVALID`, nothing that is trained has an influence; and
                what the sessions raise.
            PassAborted: The guard says to stop.
            Exception: Whatever the model raises.
        """
        with ExitStack() as contexts:
            contexts.enter_context(torch.enable_grad())
            contexts.enter_context(activation_checkpointing(self._recomputed))
            contexts.enter_context(self._guarded.asking(guard))
            rules = self._rule_session(contexts)
            with self._saved.forward():
                loss, scores = self._forward(batch, guard)
            share = self._spec.accumulation
            (loss / share if share > 1 else loss).backward()
        return scores, dict(enumerate(rules.changed)) if rules is not None else {}

    def evaluate(self, module: nn.Module, batch: Batch, guard: PassGuard) -> tuple[Scores, Tensor]:
        """Run a batch forward on another tree of the same model, and return the loss and the main output."""
        with torch.no_grad(), autocast(self._spec.precision, self._device):
            output, total, terms = self._score(module, batch, guard)
        return _scores(total, terms), main_output(output).detach()

    def _rule_session(self, contexts: ExitStack) -> GradientRuleSession | None:
        return contexts.enter_context(GradientRuleSession(self._module, self._rules)) if self._rules else None

    def _forward(self, batch: Batch, guard: PassGuard) -> tuple[Tensor, Scores]:
        with autocast(self._spec.precision, self._device):
            _, loss, terms = self._score(self._module, batch, guard)
            extra = self._penalties()
            if extra is not None:
                loss = loss + extra
        if not loss.requires_grad:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                "the loss does not depend on anything that is trained: the pass does not come to it; choose "
                "other `trainable` parts",
            )
        scores = _scores(loss, terms)
        if not torch.isfinite(loss.detach()):
            raise NonFiniteError("the loss")
        return loss, scores

    def _score(
        self, module: nn.Module, batch: Batch, guard: PassGuard
    ) -> tuple[Any, Tensor, Mapping[str, Tensor]]:
        self._loss.check_targets(batch.targets, batch.size, self._shapes.of_batch(batch))
        taught: dict[Any, Tensor] = {}
        for teacher in self._teachers:
            taught |= teacher.values(batch, guard)
        with guard.watching(module), self._watched.collecting(module) as values:
            output = module(*batch.args, **batch.kwargs)
        total, terms = self._loss(output, values, batch.targets, taught)
        return output, total, terms


class _Shapes:
    """Shapes of the values that losses are of, as far as a recorded pass tells."""

    def __init__(
        self, losses: Sequence[LossSpec], record: Callable[[], Recording], input_shape: tuple[int, ...]
    ) -> None:
        self._input_shape = input_shape
        self._known: dict[bool, dict[str, Shape]] = {True: {}, False: {}}
        with suppress(
            ServiceError
        ):  # a model that needs its own data: targets are then checked by its output
            for is_same in self._known:
                self._known[is_same] = known_shapes(losses, record(), is_same_size=is_same)

    def of_batch(self, batch: Batch) -> Mapping[str, Shape]:
        """Return the shapes for a batch; sizes of images only where they are those of the recorded pass."""
        first = next(iter(batch.args), None)
        return self._known[isinstance(first, Tensor) and tuple(first.shape[1:]) == self._input_shape]


def _copying(rules: Sequence[GradientRule]) -> tuple[GradientRule, ...]:
    """Let rules take copies where needed: in train mode more is written in place than in a recorded pass."""
    return tuple(
        replace(rule, targets=tuple(replace(target, clone=True) for target in rule.targets)) for rule in rules
    )


def _scores(total: Tensor, terms: Mapping[str, Tensor]) -> Scores:
    return Scores(float(total.detach()), {name: float(term.detach()) for name, term in terms.items()})
