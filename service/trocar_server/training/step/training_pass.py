"""Training pass: one forward and backward pass of a trainer, from a batch to gradients.

# Note: [Where the guard is checked]
A guard's own hooks are on module calls, and no module is called in a backward pass. So it is checked when a
weight's gradient is computed, and when the pass reaches the output of a frozen module. Hooks cost some
microseconds each, so only modules with a weight of two dimensions or more have one: these take the time.
After the first pass, frozen modules that got no gradient have none either.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.layouts import example_layouts
from trocar_server.engine.host.recordings import record_example
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, stages_for
from trocar_server.models.inputs import BATCH, IMAGE_BATCH, TOKEN_IDS, InputSignature
from trocar_server.surgery import (
    NoReruns,
    PassGuard,
    Recording,
    differentiable_recurrence,
    named_arguments,
    recurrent_layers,
)
from trocar_server.surgery.sessions.gradient_edits import GradientEdit, GradientEditSession
from trocar_server.surgery.sessions.gradient_sets import SetChange, apply_to_sums
from trocar_server.surgery.structure import leaves
from trocar_server.training.losses.batch import Batch
from trocar_server.training.losses.class_dims import ClassDims
from trocar_server.training.losses.loss_function import LossFunction, NoLabelsError, Shape, main_output
from trocar_server.training.losses.loss_taps import LossTaps
from trocar_server.training.losses.loss_values import known_shapes, loss_layout
from trocar_server.training.losses.regularizers import Penalties
from trocar_server.training.losses.teachers import make_teachers
from trocar_server.training.model.amp import autocasting
from trocar_server.training.model.trained_parameters import select_modules
from trocar_server.training.spec.trainer_spec import LossSpec, TrainerSpec
from trocar_server.training.step.activation_checkpointing import (
    activation_checkpointing,
    models_own_checkpointing,
)
from trocar_server.training.step.gradient_edit_targets import make_rules
from trocar_server.training.step.in_backward import NonFiniteError
from trocar_server.training.step.rollback import BufferBackup, check_replacement
from trocar_server.training.step.saved_tensors import SavedTensors
from trocar_server.training.step.value_edits import ValueEdits


@dataclass(frozen=True)
class Scores:
    """The loss of a batch and its terms."""

    loss: float
    terms: Mapping[str, float]


class TrainingPass:
    """Runs batches forward and backward; gradients are left in the parameters' `grad`.

    Args:
        module: The trainer's module tree.
        spec: The trainer's spec.
        trained: Trained parameters by name.
        hosted: The hosted view of the trainer's model, for recorded passes.
        teachers: Hosted models by id.
        saved: Storage of saved tensors.
        buffers: The buffers of the module tree.

    Attributes:
        changes_sums: Whether there are rules for accumulated gradients.

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
        buffers: BufferBackup,
    ) -> None:
        stages = stages_for(hosted)
        recorded = cache(lambda: record_example(hosted))
        record = cache(lambda: replace(recorded()[1], stages=stages))
        self._module, self._spec, self._saved = module, spec, saved
        self._trained, self._buffers = trained, buffers
        of_texts = any(entry.name.endswith(TOKEN_IDS) for entry in hosted.signature.inputs)
        layouts = cache(lambda: replace(record(), layouts=example_layouts(*recorded())))
        layout_of = cache(lambda selector: loss_layout(selector, layouts()))
        self._loss = LossFunction(spec.losses, of_texts=of_texts, layout_of=layout_of)
        self._shapes = _Shapes(spec.losses, record, hosted, self._loss.class_dims)
        self._penalties: Penalties | None = None
        if spec.regularizers:
            self._penalties = Penalties(spec.regularizers, trained, module, stages)
        self._loss_taps = LossTaps(self._loss.selectors, record) if self._loss.selectors else None
        self._autocast = autocasting(spec.precision, hosted.device)
        self._teachers = make_teachers(self._loss.teachers, teachers)
        self._rules: tuple[GradientEdit, ...] = ()
        if spec.gradient_edits:
            self._rules = _copying(make_rules(spec.gradient_edits, module, record(), tuple(trained)))
        self._edits = ValueEdits(spec.edits, layouts()) if spec.edits else None
        attached = _attached(self._rules, self._loss_taps, self._edits)
        self._no_reruns = NoReruns(module, attached) if attached else None
        self._of_batches = _late(self._rules, "batch")
        self._of_sums = _late(self._rules, "accumulated")
        self.changes_sums = bool(self._of_sums)
        paths = select_modules(module, spec.activation_checkpointing, "activation_checkpointing", stages)
        self._guarded = BackwardGuard(module)
        self._recomputed = {path: module.get_submodule(path) for path in paths}
        self._recurrent = recurrent_layers(module)
        self._checkpointing = models_own_checkpointing(module)

    def run(self, batch: Batch, guard: PassGuard) -> tuple[Scores, Mapping[int, int]]:
        """Run a batch forward and backward.

        Returns:
            The loss, and the number of elements that each gradient edit changed.

        Raises:
            NonFiniteError: The loss is not finite, or there is none, as all labels are ignored, and the
                trainer skips such batches; the backward pass was not started.
            ServiceError: `TARGET_REJECTED`; `INPUT_REJECTED`, a buffer has got another shape;
                `TRAINER_INVALID`, no trained parameter influences the loss; `MODULE_NOT_CALLED`, the pass
                has not reached an edited value; and what the sessions raise.
            PassAborted: The guard aborted the pass.
            Exception: Any error of the model.
        """
        with ExitStack() as contexts:
            contexts.enter_context(torch.enable_grad())
            if self._recurrent:  # first: what is recomputed below is then the forward from here
                contexts.enter_context(differentiable_recurrence(self._recurrent))
            contexts.enter_context(self._checkpointing)
            if self._recomputed:
                contexts.enter_context(activation_checkpointing(self._recomputed))
            contexts.enter_context(self._guarded.asking(guard))
            if self._no_reruns is not None:
                contexts.enter_context(self._no_reruns)
            edits = None if self._edits is None else self._edits.session(self._module)
            if edits is not None:
                contexts.enter_context(edits)
            rules = GradientEditSession(self._module, self._rules) if self._rules else None
            if rules is not None:
                contexts.enter_context(rules)
            if edits is not None:
                edits.carry_writes()
            with self._saved.forward() if self._saved.is_used else nullcontext():
                loss, scores = self._forward(batch, guard)
            if edits is not None:
                edits.check_made()
            share = self._spec.accumulation
            (loss / share if share > 1 else loss).backward()
        self._buffers.settle()  # not before: the backward pass may need their old values
        if rules is None:
            return scores, {}
        changed: dict[int, Tensor | int] = dict(enumerate(rules.changed))
        if self._of_batches:
            changed |= apply_to_sums(self._of_batches, self._trained, self.present())
        return scores, {index: int(count) for index, count in changed.items()}

    def present(self) -> frozenset[str]:
        """Return the names of the parameters that have a gradient."""
        return frozenset(name for name, parameter in self._trained.items() if parameter.grad is not None)

    def change_sums(self, collected: Collection[str]) -> Mapping[int, int]:
        """Apply the rules for accumulated gradients, of Note: [Rules on accumulated gradients].

        Args:
            collected: Names of the parameters that got a gradient in the last backward pass.

        Returns:
            The number of elements that each such rule changed.
        """
        changed = apply_to_sums(self._of_sums, self._trained, collected)
        return {index: int(count) for index, count in changed.items()}

    def evaluate(self, module: nn.Module, batch: Batch, guard: PassGuard) -> tuple[Scores, Tensor | None]:
        """Run a batch forward on another tree of the same model, and return loss and main output.

        The output has its samples first. There is no main output where every loss has a selector: such a
        model may not have one.
        """
        with torch.no_grad(), self._autocast():
            output, total, terms = self._score(module, batch, guard)
        has_main = any(not spec.selector for spec in self._spec.losses)
        if not has_main:
            return _scores(total, terms), None
        main = self._loss.class_dims.samples_first("", main_output(output).detach())
        return _scores(total, terms), main

    def class_dim(self, rank: int) -> int:
        """Return the dimension of the classes of the main output of `evaluate`, of this rank."""
        known = self._loss.class_dims.known("", rank)
        return min(1, rank - 1) if known is None else known

    def _forward(self, batch: Batch, guard: PassGuard) -> tuple[Tensor, Scores]:
        with self._autocast():
            try:
                _, loss, terms = self._score(self._module, batch, guard)
            except NoLabelsError as error:
                if self._spec.on_nonfinite == "fail":
                    raise
                raise NonFiniteError("the loss") from error
            extra = None if self._penalties is None else self._penalties()
            if extra is not None:
                loss = loss + extra
        for owner, name, tensor in self._buffers.places:
            if owner[name] is not tensor:  # checked before an optimizer updates weights in the backward pass
                check_replacement(name, tensor, owner[name])
        if not loss.requires_grad:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                "the loss does not depend on anything that is trained: the pass does not reach it; "
                "choose other "
                "`trainable` parameters",
            )
        scores = _scores(loss, terms)
        if not torch.isfinite(loss.detach()):
            raise NonFiniteError("the loss")
        return loss, scores

    def _score(
        self, module: nn.Module, batch: Batch, guard: PassGuard
    ) -> tuple[Any, Tensor, Mapping[str, Tensor]]:
        counts = self._loss.check_targets(batch.targets, batch.size, self._shapes.of_batch(batch))
        taught: dict[Any, Tensor] = {}
        for teacher in self._teachers:
            taught |= teacher.values(batch, guard)
        taps: AbstractContextManager[dict[str, Tensor]] = nullcontext({})
        if self._loss_taps is not None:
            taps = self._loss_taps.collecting(module)
        with guard.watching(module), taps as values:
            output = module(*batch.args, **batch.kwargs)
        given = named_arguments(module, batch.args, batch.kwargs) if batch.args else batch.kwargs
        total, terms = self._loss(output, values, batch.targets, taught, given, counts)
        return output, total, terms


class _Shapes:
    """Shapes of the values of losses by term, as far as known from a recorded pass."""

    def __init__(
        self,
        losses: Sequence[LossSpec],
        record: Callable[[], Recording],
        hosted: HostedModel,
        class_dims: ClassDims,
    ) -> None:
        self._input_shape = hosted.input_shape if hosted.known_signature is None else None
        varying = _varying_sizes(hosted.signature)
        self._cached_shapes: dict[bool, dict[int, Shape]] = {True: {}, False: {}}
        with suppress(ServiceError):  # a data-dependent model: targets are then checked against its output
            for is_same in self._cached_shapes:
                self._cached_shapes[is_same] = known_shapes(
                    losses, record(), is_same_size=is_same, class_dims=class_dims, varying=varying
                )

    def of_batch(self, batch: Batch) -> Mapping[int, Shape]:
        """Return the shapes for a batch; image sizes only if equal to the recorded pass's."""
        first = next(iter((*batch.args, *batch.kwargs.values())), None)
        return self._cached_shapes[isinstance(first, Tensor) and tuple(first.shape[1:]) == self._input_shape]


def _varying_sizes(signature: InputSignature) -> frozenset[int]:
    """Return the sizes of the example's inputs, without the batch, that other inputs need not have."""
    return frozenset(
        size
        for entry in signature.inputs
        for name, size in zip(entry.shape or (), signature.shape_of(entry, 1), strict=False)
        if name not in (BATCH, IMAGE_BATCH) and (isinstance(name, str) or not signature.is_complete)
    )


def _copying(rules: Sequence[GradientEdit]) -> tuple[GradientEdit, ...]:
    """Let rules copy where needed: train mode has more in-place writes than a recorded pass."""
    return tuple(
        replace(rule, targets=tuple(replace(target, clone=True) for target in rule.targets)) for rule in rules
    )


def _attached(
    rules: Sequence[GradientEdit], taps: LossTaps | None, edits: ValueEdits | None
) -> frozenset[str]:
    """Return the paths of the modules at whose values there are rules, losses or edits."""
    of_rules = {target.path for rule in rules for target in rule.targets}
    others = [part.paths for part in (taps, edits) if part is not None]
    return frozenset(of_rules).union(*others)


def _late(rules: Sequence[GradientEdit], when: str) -> dict[int, tuple[SetChange, tuple[str, ...]]]:
    """Return the change and the parameters, by position, of the rules that act after the backward pass."""
    return {
        index: (rule.late, rule.parameters)
        for index, rule in enumerate(rules)
        if rule.late is not None and rule.when == when
    }


def _scores(total: Tensor, terms: Mapping[str, Tensor]) -> Scores:
    numbers: dict[str, float] = {}
    for name, term in terms.items():
        numbers[name] = float(term.detach())
    return Scores(float(total.detach()), numbers)


class BackwardGuard:
    """Lets a guard abort backward passes of a module tree. See Note: [Where the guard is checked].

        watch = BackwardGuard(model)
        with watch.asking(guard):
            model(batch).sum().backward()

    Args:
        module: The trainer's module tree; its set of trained parameters must not change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._weights: list[nn.Parameter] = []
        frozen: list[nn.Module] = []
        parts = [part for part in module.modules() if part._parameters]
        heavy = [part for part in parts if any(p.ndim > 1 for p in part.parameters(recurse=False))]
        for part in heavy or parts:
            own = list(part.parameters(recurse=False))
            trained = [parameter for parameter in own if parameter.requires_grad]
            if trained:
                self._weights.append(trained[0])
            elif own:
                frozen.append(part)
        self._frozen: Sequence[nn.Module] = frozen
        self._is_known = False

    @contextmanager
    def asking(self, guard: PassGuard) -> Iterator[None]:
        """Check the guard in the backward pass of computations made inside the context."""
        reached: list[nn.Module] = []
        frozen = frozenset(map(id, self._frozen))

        def check(_: Tensor) -> None:
            guard.check()

        def leave(part: nn.Module, _: tuple[Any, ...], output: Any) -> None:
            if id(part) not in frozen:
                return
            tensors = [output] if isinstance(output, Tensor) else [leaf for _picks, leaf in leaves(output)]
            for tensor in tensors:
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(check)
                    reached.append(part)

        with ExitStack() as hooks:
            for weight in self._weights:
                hooks.callback(weight.register_hook(check).remove)
            if not self._is_known:
                # Not at the modules: torch computes an encoder layer without gradients in one kernel, with
                # other last bits, unless a module in it has a hook. The first pass must have those of others.
                hooks.callback(register_module_forward_hook(leave).remove)
            for part in self._frozen if self._is_known else ():
                hooks.callback(part.register_forward_hook(leave).remove)
            yield
        if not self._is_known:
            self._frozen, self._is_known = list(dict.fromkeys(reached)), True
