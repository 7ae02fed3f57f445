"""Compiled variant of a pass, and its state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, unique

import torch

from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.backends.candidates import Candidate, Runner
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.compiled.group_sizes import GroupSizes
from trocar_server.engine.execute.arguments import predicted_signature, signature_of_batch
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import (
    AS_USUAL,
    Execution,
    ImageInput,
    Plan,
    Signature,
    TapRequest,
    TensorInput,
    batch_size,
)
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.runner import PassCall
from trocar_server.engine.schedule.merging import MergingQueue
from trocar_server.nested_names import is_nested
from trocar_server.storage.temporary_folder import TemporaryFolder
from trocar_server.surgery import parse_selector

_CHUNK_BYTES = 1 << 20  # of a request that is never sent


@unique
class State(StrEnum):
    """State of a compiled variant."""

    COUNTING = "counting"
    """Not requested often enough."""
    BUILDING = "building"
    """Another process builds it."""
    CANDIDATE = "candidate"
    """A runner exists, not yet tried on a real batch."""
    TRYING = "trying"
    """It is being tried."""
    READY = "ready"
    """Calls run on it."""
    REFUSED = "refused"
    """Nothing faster keeps the promise."""


@dataclass(eq=False)
class Variant:
    """One compiled variant: values of one model, for inputs of one row shape, within some numerics."""

    deployment: Deployment
    recipe: Recipe
    numerics: Numerics
    """The loosest that its callers accept."""
    queue: MergingQueue[PassCall, Extraction]
    sizes: GroupSizes
    asked_count: int = 0
    state: State = State.COUNTING
    runner: Runner | None = None
    """Runs its calls once it is ready; before that, the runner to try."""
    ways: Iterator[Candidate] = field(default_factory=lambda: iter(()))
    """The candidates to try after that."""
    folder: TemporaryFolder | None = None
    """Folder of the built files, as long as a candidate may need them."""
    built: Built = field(default_factory=Built)
    """The result of the build process."""
    kept_key: str | None = None
    """Its key in the variant store; None for one that is not kept."""
    is_proven: bool = True
    """Whether this process compared it with eager on a caller's batch; otherwise on an example only."""
    group_count: int = 0
    failed_count: int = 0
    """Calls in a row on which it failed, and eager did not."""
    undecided_count: int = 0
    """Trials for which there was too little memory, or whose values were not finite."""
    problems: list[str] = field(default_factory=list)
    """The reasons why tried candidates were rejected."""

    @property
    def is_ready(self) -> bool:
        """Whether calls run on it."""
        return self.state is State.READY

    def give_up(self) -> None:
        """Release everything; its calls run eagerly from now on."""
        self.state, self.runner, self.ways = State.REFUSED, None, iter(())
        self.clean()

    def clean(self) -> None:
        """Remove built files; a runner has already mapped those that it needs."""
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def rows_of(plan: Plan) -> int:
    """Return the number of samples in a plan's batch; 0 where it has none."""
    return batch_size(plan.inputs) or 0


def is_one_forward(plan: Plan) -> bool:
    """Whether a plan is one forward pass from the inputs: all others always run eagerly."""
    return not (plan.objective or plan.sources or plan.start_at)


def argument_specs(deployment: Deployment, plan: Plan) -> tuple[ArgumentSpec, ...] | None:
    """Return the row shapes of a plan's arguments; None if there are no tensors or the shapes are unknown."""
    hosted, names = deployment.hosted, [entry.name for entry in plan.inputs]
    if deployment.is_live or hosted.takes_list or not plan.inputs or any(map(is_nested, names)):
        return None
    if not all(isinstance(entry, TensorInput | ImageInput) for entry in plan.inputs):
        return None
    signature = plan_signature(deployment, plan)
    rows = rows_of(plan)
    if rows < 1 or [entry.name for entry in signature] != names:  # images beside what the example has not
        return None
    if any(not entry.shapes[0] or entry.shapes[0][0] != rows for entry in signature):
        return None
    positions, keywords = hosted.forward.called(names, range(len(names)))
    if positions != list(range(len(positions))):  # not in the order of the call
        return None
    passed = {position: keyword for keyword, position in keywords.items()}
    return tuple(
        ArgumentSpec(entry.dtype, entry.shapes[0][1:], passed.get(position, ""))
        for position, entry in enumerate(signature)
    )


def example_plan(deployment: Deployment, taps: Sequence[str], execution: Execution = AS_USUAL) -> Plan:
    """Return a request for values of one example.

    Raises:
        ServiceError: A selector is malformed.
    """
    hosted = deployment.hosted
    tensors = [value for value in hosted.example_inputs() if isinstance(value, torch.Tensor)]
    named = zip(hosted.example_names, tensors, strict=True)
    inputs = tuple(TensorInput(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in named)
    requests = tuple(TapRequest(parse_selector(text)) for text in taps)
    return Plan(hosted.spec.model_id, requests, inputs, _CHUNK_BYTES, execution=execution)


def plan_signature(deployment: Deployment, plan: Plan) -> Signature:
    """Return the signature of a plan's arguments; for images, that of the example input with as many rows."""
    if not any(isinstance(entry, ImageInput) for entry in plan.inputs):
        return predicted_signature(deployment.hosted, plan.inputs) or ()
    return signature_of_batch(deployment.hosted, rows_of(plan), deployment.example_dtype)
