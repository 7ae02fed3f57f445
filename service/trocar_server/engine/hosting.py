"""A loaded model at work: its replicas and what was recorded of its passes."""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.inputs import signature_of_batch
from trocar_server.engine.lease import Replica, ReplicaPool
from trocar_server.engine.memory import graph_bytes
from trocar_server.engine.plan import EditRequest, Plan, Signature, TapRequest
from trocar_server.engine.planner import Resolved, resolve_taps
from trocar_server.engine.recordings import Called, Recorder, record_example
from trocar_server.engine.rehearsal import rehearse
from trocar_server.engine.surgery_plan import plan_surgery
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel, make_replica, stages_for
from trocar_server.surgery import PassGuard, Recording, Selector, parse_selector, resolve

_RECORDINGS_KEPT = 64
_RESOLVED_KEPT = 256
_MOST_WEIGHT_KEPT = 2048
"""The most names and numbers in a resolved request that is kept: 256 of the largest come to some 200 MB."""
_DEPENDS_ON_DATA = (ErrorReason.MODULE_NOT_CALLED, ErrorReason.CALL_OUT_OF_RANGE)

KINDS = frozenset({"fx", "fn"})
"""What is recorded beside modules only where it is asked for: nodes and functions."""

Check = Callable[[Recording], None]


@dataclass(frozen=True)
class SourceForm:
    """The inputs of a source: their form and a recorded pass on them; None of each where not known yet."""

    signature: Signature | None
    recording: Recording | None


SourceForms = Mapping[str, SourceForm]
"""By the source's name."""

_Key = tuple[object, ...]


@dataclass
class Host:
    """What the engine holds for one loaded model. Built and recorded on the owner thread."""

    hosted: HostedModel
    pool: ReplicaPool
    recorder: Recorder
    example: Recording
    is_live: bool = False
    """Whether its weights change between passes, as a trainer's do."""
    is_repeatable: bool = False
    """Whether equal requests are known to have equal answers."""
    version: str = field(default_factory=lambda: secrets.token_hex(16))
    """Another one for each time that a model is loaded, under whatever id."""
    _lock: Lock = field(default_factory=Lock)  # the event loop looks up what the owner thread adds
    _recordings: OrderedDict[Signature, Recording] = field(default_factory=OrderedDict)
    _resolved: OrderedDict[_Key, Resolved] = field(default_factory=OrderedDict)

    @property
    def meta(self) -> nn.Module | None:
        """The model's tree without data; None where it has no pass without data."""
        return self.recorder.meta

    @property
    def example_dtype(self) -> torch.dtype:
        """The dtype of the example input: floats, or whole numbers for a model that takes tokens."""
        taken = (leaf.dtype for call in self.example.modules[""].calls for leaf in call.inputs)
        return next((dtype for dtype in taken if dtype is not None), torch.float32)

    @property
    def example_signature(self) -> Signature:
        """The form of the example input, with a batch of one."""
        return signature_of_batch(self.hosted, 1, self.example_dtype)

    def kinds(self, taps: Sequence[TapRequest], edits: Sequence[EditRequest] = ()) -> frozenset[str]:
        """Return what has to be recorded beside modules: `fx` nodes, `fn` functions."""
        selectors: list[Selector] = [*(tap.selector for tap in taps), *(edit.selector for edit in edits)]
        stages = [
            parse_selector(self.example.stages[s.path]) for s in selectors if s.path in self.example.stages
        ]
        return frozenset(selector.kind for selector in (*selectors, *stages)) & KINDS

    def recorded(self, signature: Signature, kinds: frozenset[str] = frozenset()) -> Recording | None:
        """Return the recording of a pass on inputs of this form, if it was made with all that is needed."""
        with self._lock:
            found = self._recordings.pop(signature, None)
            if found is not None:
                self._recordings[signature] = found  # now the last used
        return None if found is None or kinds - _kinds_of(found) else found

    def record(
        self,
        signature: Signature,
        guard: PassGuard | None = None,
        kinds: frozenset[str] = frozenset(),
        check: Check | None = None,
    ) -> Recording:
        """Record a pass on inputs of this form: without data, or on random data where that cannot be.

        Args:
            signature: The form of the inputs.
            guard: Says whether to go on.
            kinds: What to record beside modules.
            check: Refuses what is asked for as soon as modules and shapes are known: halfway.

        Raises:
            ServiceError: `INPUT_REJECTED` when the model cannot take such inputs, `NOT_TRACEABLE` when
                nodes are asked for and there are none, and what `check` raises.
        """
        found = self.recorded(signature, kinds)
        if found is None:
            found = self._record(signature, guard or PassGuard(), kinds, check)
            with self._lock:
                self._recordings[signature] = found
                if len(self._recordings) > _RECORDINGS_KEPT:
                    self._recordings.popitem(last=False)
        return found

    def _record(
        self, signature: Signature, guard: PassGuard, kinds: frozenset[str], check: Check | None
    ) -> Recording:
        before = self.recorded(signature)

        def check_staged(recording: Recording) -> None:
            if check is not None and not kinds:  # nodes and functions are recorded later
                check(_staged(self.hosted, recording))

        try:
            wanted = kinds | (_kinds_of(before) if before else frozenset())
            recording = self.recorder.record(signature, wanted, guard, check_staged)
        except ServiceError:
            raise
        except Exception as error:
            raise input_rejected(self.hosted, error) from error
        return _staged(self.hosted, recording)

    def record_data(self, called: Called, guard: PassGuard, kinds: frozenset[str] = frozenset()) -> Recording:
        """Record a pass on the caller's own data, for a model that decides on it."""
        return _staged(self.hosted, self.recorder.record_data(called, kinds, guard))

    def may_differ(self, error: ServiceError) -> bool:
        """Whether a selector's error may be due to the data that the recording was made with."""
        return self.meta is None and error.reason in _DEPENDS_ON_DATA

    def resolve(
        self,
        plan: Plan,
        signature: Signature,
        recording: Recording,
        max_reply_bytes: int,
        sources: SourceForms,
    ) -> Resolved:
        """Resolve a plan for inputs of a form that was recorded; what was asked before is at hand.

        Args:
            plan: What is asked for.
            signature: The form of its inputs.
            recording: A pass on such inputs.
            max_reply_bytes: The most bytes of values.
            sources: The form and recording of the inputs of each source, by name.

        Raises:
            ServiceError: See `resolve_taps` and `plan_surgery`.
        """
        key = _key(plan, signature, sources)
        with self._lock:
            found = self._resolved.get(key)
        if found is None:
            recordings = {name: form.recording for name, form in sources.items()}
            surgery = plan_surgery(plan.edits, plan.objective, recording, recordings)
            found = resolve_taps(plan.taps, recording, max_reply_bytes, surgery)
            self._keep(key, plan, found)
        return found

    def rehearse(
        self, plan: Plan, resolved: Resolved, signature: Signature, sources: SourceForms, guard: PassGuard
    ) -> Resolved:
        """Return what a pass with gradients has shown without data, where there is one. Owner thread only.

        Raises:
            ServiceError: What is wrong with the objective, `NOT_DIFFERENTIABLE` among it.
        """
        if not resolved.needs_rehearsal:
            return resolved
        meta = self.meta
        rehearsal = None if meta is None else rehearse(meta, plan, resolved, signature, guard)
        if rehearsal is None:
            return self._unrehearsed(resolved, signature)
        found = resolved.rehearsed(rehearsal)
        self._keep(_key(plan, signature, sources), plan, found)
        return found

    def _unrehearsed(self, resolved: Resolved, signature: Signature) -> Resolved:
        """Return what is known of a pass with gradients that only data can show."""
        recording = self.recorded(signature)
        if recording is None:
            return resolved
        scored = [target for target, _ in resolved.surgery.scored]
        needed = max(resolved.pass_bytes, graph_bytes(scored, recording))
        return replace(resolved, pass_bytes=needed)

    def _keep(self, key: _Key, plan: Plan, resolved: Resolved) -> None:
        if _weight(plan, resolved) > _MOST_WEIGHT_KEPT:
            return
        with self._lock:
            self._resolved[key] = resolved
            if len(self._resolved) > _RESOLVED_KEPT:
                self._resolved.popitem(last=False)


def _key(plan: Plan, signature: Signature, sources: SourceForms) -> _Key:
    """Return what a plan's resolution depends on."""
    forms = tuple((name, form.signature) for name, form in sources.items())
    return plan.taps, plan.edits, plan.objective, signature, forms


def _weight(plan: Plan, resolved: Resolved) -> int:
    """Count what a request holds in memory: names that it expands to, and numbers that it came with."""
    expansions = (*resolved.expansions, *(names for _, names in resolved.surgery.expansions))
    steps = [step for tap in plan.taps for step in tap.reductions]
    steps += [take for request in plan.edits for take in request.edit.region.takes]
    numbers = sum(len(getattr(step, "positions", ())) for step in steps)
    numbers += sum(len(tap.parameters.edges) + len(tap.parameters.quantiles) for tap in plan.taps)
    terms = plan.objective.terms if plan.objective else ()
    numbers += sum(len(getattr(term.score, "classes", ())) for term in terms)
    return sum(map(len, expansions)) + numbers


def make_host(hosted: HostedModel, replica_count: int, max_queue: int, *, is_live: bool = False) -> Host:
    """Make the replicas of a model and record one pass on its example input.

    Raises:
        ServiceError: `MODEL_INVALID` when the model cannot run on its example input, or a stage that
            its configuration names is no value of that pass.
    """
    replicas = [Replica(make_replica(hosted.module), is_live) for _ in range(replica_count)]
    recorder, recording = record_example(hosted)
    host = Host(hosted, ReplicaPool(replicas, max_queue), recorder, _staged(hosted, recording), is_live)
    for stage, selector in hosted.spec.stages.items():
        _check_stage(host, stage, selector)
    return host


def _staged(hosted: HostedModel, recording: Recording) -> Recording:
    """Add the names of the model's stages, which selectors may use."""
    return replace(recording, stages=stages_for(hosted.spec))


def _kinds_of(recording: Recording) -> frozenset[str]:
    kinds = {"fx": recording.nodes, "fn": recording.functions}
    return frozenset(kind for kind, records in kinds.items() if records is not None)


def _check_stage(host: Host, stage: str, text: str) -> None:
    """Refuse a stage of the configuration that is no value of the example's pass."""
    problem = "a module has that name, and comes first" if stage in host.example.modules else ""
    try:
        selector = parse_selector(text)
        kinds = frozenset({selector.kind}) & KINDS
        recording = host.record(host.example_signature, kinds=kinds) if kinds else host.example
        resolve([selector], replace(recording, stages={}))  # a stage stands for no other stage
    except ServiceError as error:
        problem = problem if host.may_differ(error) else error.message
    if problem:
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"model '{host.hosted.spec.model_id}': its stage '{stage}' does not work: {problem}",
        )


def input_rejected(hosted: HostedModel, error: BaseException) -> ServiceError:
    """Say that the model failed on its inputs, with its own words and the shape that it expects."""
    shape = ", ".join(["batch", *map(str, hosted.input_shape)])
    return ServiceError(
        ErrorReason.INPUT_REJECTED,
        f"model '{hosted.spec.model_id}' cannot take these inputs: {first_line(error)}; "
        f"an example input has shape ({shape})",
    )
