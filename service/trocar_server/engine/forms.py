"""Compiled forms of passes: what one is, and how far it is."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum, unique

from trocar_server.engine.compiled_pass import CompiledCall
from trocar_server.engine.group_sizes import GroupSizes
from trocar_server.engine.hosting import Host
from trocar_server.engine.inputs import predicted_signature, signature_of_batch
from trocar_server.engine.merging import MergingQueue
from trocar_server.engine.outcome import Extraction
from trocar_server.engine.plan import Plan, Signature, TensorInput, batch_size
from trocar_server.engines import Numerics
from trocar_server.engines.candidates import Candidate, Runner
from trocar_server.engines.form_folder import FormFolder
from trocar_server.engines.recipe import ArgumentForm, Recipe


@unique
class State(StrEnum):
    """How far a compiled form is."""

    COUNTING = "counting"
    """Not asked for often enough."""
    BUILDING = "building"
    """Another process is at it."""
    CANDIDATE = "candidate"
    """There is a runner that was not tried on a real batch."""
    TRYING = "trying"
    """It is being tried."""
    READY = "ready"
    """Calls run on it."""
    REFUSED = "refused"
    """Nothing faster keeps the promise."""


@dataclass(eq=False)
class Form:
    """One compiled form: values of one model, for inputs of one row shape, within some numerics."""

    host: Host
    recipe: Recipe
    numerics: Numerics
    """The loosest that its callers take."""
    queue: MergingQueue[CompiledCall, Extraction]
    sizes: GroupSizes
    asked_count: int = 0
    state: State = State.COUNTING
    runner: Runner | None = None
    """What its calls run on, once it is ready; what is to be tried, before that."""
    ways: Iterator[Candidate] = field(default_factory=lambda: iter(()))
    """What can be tried after that."""
    folder: FormFolder | None = None
    """Where built files are, as long as a way may need them."""
    group_count: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether calls run on it."""
        return self.state is State.READY

    def give_up(self) -> None:
        """Let go of everything; its calls run eagerly from now on."""
        self.state, self.runner, self.ways = State.REFUSED, None, iter(())
        self.clean()

    def clean(self) -> None:
        """Remove built files; a runner has mapped what it needs."""
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


def rows_of(plan: Plan) -> int:
    """Return the samples of a plan's batch; 0 where it has none."""
    return batch_size(plan.inputs) or 0


def looks_only(plan: Plan) -> bool:
    """Whether a plan changes nothing and needs no gradient: the rest is always eager."""
    return not (plan.edits or plan.objective or plan.sources or plan.start_at)


def argument_forms(host: Host, plan: Plan) -> tuple[ArgumentForm, ...] | None:
    """Return the row shapes of a plan's arguments; None where they are none or not known."""
    if host.is_live or host.hosted.takes_list or not plan.inputs or any(e.name for e in plan.inputs):
        return None
    signature = assumed_form(host, plan)
    rows = rows_of(plan)
    if rows < 1 or any(not entry.shapes[0] or entry.shapes[0][0] != rows for entry in signature):
        return None
    return tuple(ArgumentForm(entry.dtype, entry.shapes[0][1:]) for entry in signature)


def assumed_form(host: Host, plan: Plan) -> Signature:
    """Return the form of a plan's arguments; of images, that of the example input with as many rows."""
    if all(isinstance(entry, TensorInput) for entry in plan.inputs):
        return predicted_signature(host.hosted, plan.inputs) or ()
    return signature_of_batch(host.hosted, rows_of(plan), host.example_dtype)
