"""Deployment: a loaded model with its replicas and recorded passes."""

import asyncio
import math
import secrets
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.execute.arguments import input_advice, signature_of_batch, signature_of_called
from trocar_server.engine.host.gradient_meta_pass import run_meta_pass
from trocar_server.engine.host.layouts import ModelLayouts
from trocar_server.engine.host.predictions import Predictions
from trocar_server.engine.host.recordings import (
    Called,
    DataNeededError,
    MadeDataRefusedError,
    ModelRecorder,
    example_dtype,
    record_example,
)
from trocar_server.engine.host.rejections import rejection
from trocar_server.engine.request.plan import EditRequest, Plan, Signature, TapRequest
from trocar_server.engine.resolve.pass_memory import check_memory, graph_bytes, made_pass_bytes
from trocar_server.engine.resolve.pass_work import check_seconds, made_pass_work
from trocar_server.engine.resolve.planner import Resolved, checked_byte_count, resolve_taps
from trocar_server.engine.resolve.surgery_plan import plan_surgery
from trocar_server.engine.schedule.lease import Replica, ReplicaPool
from trocar_server.engine.schedule.pace import Pace
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel, make_replica, stages_for
from trocar_server.models.huggingface.causal import CacheSize
from trocar_server.models.identity import Identity
from trocar_server.surgery import PassGuard, Recording, Selector, parse_selector, resolve
from trocar_server.surgery.structure import format_picks
from trocar_server.tensors.reductions import dtype_name

_RECORDINGS_KEPT = 64
_RESOLVED_KEPT = 256
_MOST_WEIGHT_KEPT = 2048
"""The most names and numbers in a cached resolved request: 256 of the largest take some 200 MB."""
_SIGNATURES_KEPT = 256
_DEPENDS_ON_DATA = frozenset(
    {
        ErrorReason.MODULE_NOT_CALLED,
        ErrorReason.CALL_OUT_OF_RANGE,
        ErrorReason.AMBIGUOUS_CALL,
        ErrorReason.UNKNOWN_PICK,
        ErrorReason.UNKNOWN_FUNCTION,
        ErrorReason.NOT_A_TENSOR,
        ErrorReason.EDIT_SHAPE_MISMATCH,
        ErrorReason.EDIT_NOT_REACHED,
    }
)

KINDS = frozenset({"fx", "fn", "attention"})
"""Recorded beside modules only on request: nodes, functions, and those of these that compute attention."""

_OF_FUNCTIONS = frozenset({"fn", "attention"})

Check = Callable[[Recording], None]


@dataclass(frozen=True)
class RecordedSource:
    """The inputs of a source: their signature and a recorded pass on them; None where not known yet."""

    signature: Signature | None
    recording: Recording | None
    is_own: bool = False
    """Whether the pass was on the caller's data, so that nothing of it may be kept for other calls."""


RecordedSources = Mapping[str, RecordedSource]
"""By the source's name."""

_Key = tuple[object, ...]
"""Of a resolved plan."""


@dataclass
class Deployment:
    """Deployment of one loaded model. Built and recorded on the owner thread."""

    hosted: HostedModel
    pool: ReplicaPool
    recorder: ModelRecorder
    example: Recording
    is_live: bool = False
    """Whether its weights change between passes, as a trainer's do."""
    owner: str | None = None
    """The only principal that may use it; None where all may."""
    is_dropped: bool = False
    """Whether it is served no longer: calls that run on it end, and nothing new is kept for it."""
    is_repeatable: bool = False
    """Whether equal requests are known to have equal replies."""
    in_inference_mode: bool = True
    """Whether passes without gradients run in it; no longer when one has failed for that."""
    version: str = field(default_factory=lambda: secrets.token_hex(16))
    """Unique for each load of a model, under any id."""
    limits: Callable[[], Limits] | None = None
    """Returns the limits of a call now; None without limits."""
    recorded_count: int = 0
    """Passes that were recorded, on the meta device or on synthetic data, without that of the example."""
    differed_count: int = 0
    """Times that a pass had other shapes than predicted: what was checked before does not hold any more."""
    cache_size: CacheSize | None = None
    """Of the keys and values of texts; None before the first."""
    tensor_digests: dict[str, str] = field(default_factory=dict)
    """Of weights that never change, as far as they were hashed; see `weights_digest`."""
    described: Identity | None = None
    """Which model it is, without its weights; None until somebody asks, see `deployment_identity`."""
    digest_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while weights are hashed."""
    _to_extend: Signature | None = None
    _on_data: OrderedDict[Signature, ServiceError | None] = field(default_factory=OrderedDict)
    """Signatures that have no meta pass, with the model's error on synthetic data, if any."""
    _lock: Lock = field(default_factory=Lock)  # the event loop reads what the owner thread adds
    _recordings: OrderedDict[Signature, Recording] = field(default_factory=OrderedDict)
    _resolved: OrderedDict[_Key, Resolved] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.predictions = Predictions(self.recorder)
        self.layouts = ModelLayouts(self.recorder, self._check_made)
        self.pool.pace = Pace(self.example.work)

    @property
    def max_pass_bytes(self) -> int:
        """The most bytes that a pass may use now."""
        return sys.maxsize if self.limits is None else self.limits().max_pass_bytes

    @property
    def max_pass_s(self) -> float:
        """The most seconds that a pass may take now."""
        return math.inf if self.limits is None else self.limits().max_pass_s

    @property
    def reply_version(self) -> str | None:
        """A version unique to the current weights; None where replies are not cached."""
        return self.version if self.is_repeatable else None

    @property
    def may_change(self) -> bool:
        """Whether a trainer, or the process that the module comes from, may change its weights."""
        return self.is_live or self.hosted.spec.factory is not None

    @property
    def recordings(self) -> Mapping[Signature, Recording]:
        """The recordings that are kept, by signature; the last used at the end."""
        with self._lock:
            return dict(self._recordings)

    @property
    def meta(self) -> nn.Module | None:
        """The model's tree on the meta device; None where it has no meta pass."""
        return self.recorder.meta

    @property
    def example_dtype(self) -> torch.dtype:
        """The dtype of the example input: floats, or integers for a model that takes tokens."""
        return example_dtype(self.example)

    @property
    def example_signature(self) -> Signature:
        """The signature of the example input, with a batch of `HostedModel.example_batch`, usually one."""
        return signature_of_batch(self.hosted, self.hosted.example_batch, self.example_dtype)

    def kinds(self, taps: Sequence[TapRequest], edits: Sequence[EditRequest] = ()) -> frozenset[str]:
        """Return the kinds to record beside modules."""
        selectors: list[Selector] = [*(tap.selector for tap in taps), *(edit.selector for edit in edits)]
        stages = [
            parse_selector(self.example.stages[s.path]) for s in selectors if s.path in self.example.stages
        ]
        return frozenset(selector.records for selector in (*selectors, *stages)) & KINDS

    def recorded(self, signature: Signature, kinds: frozenset[str] = frozenset()) -> Recording | None:
        """Return the recording for a signature, recorded or predicted, if it has all the kinds needed."""
        with self._lock:
            result = self._recordings.pop(signature, None)
            if result is not None:
                self._recordings[signature] = result  # now the most recently used
        if result is None or kinds - result.kinds:
            result = self.predictions.find(signature, kinds)
            if result is not None:
                result = replace(result, layouts=self.layouts.find(signature))
                self._keep_recording(signature, result)
        return result

    def record(
        self,
        signature: Signature,
        guard: PassGuard | None = None,
        kinds: frozenset[str] = frozenset(),
        check: Check | None = None,
        *,
        may_use_data: bool = True,
    ) -> Recording:
        """Record a pass for a signature: a meta pass, or on synthetic data without meta support.

        Args:
            signature: Of the inputs.
            guard: Aborts the pass.
            kinds: Kinds to record beside modules.
            check: Refuses the request as soon as modules and shapes are known: halfway.
            may_use_data: Whether a real pass may run, at its full cost.

        Raises:
            ServiceError: `INPUT_REJECTED` when the model cannot take such inputs, `NOT_TRACEABLE` when
                nodes are requested and there are none, `PASS_TOO_LARGE`, and errors of `check`.
            DataNeededError: A real pass is needed, and may not run.
        """
        result = self.recorded(signature, kinds)
        if result is None:
            result = self._record(signature, guard or PassGuard(), kinds, check, may_use_data=may_use_data)
            self.recorded_count += 1
            if self.predictions.note(signature, result):
                self._to_extend = signature
            self._keep_recording(signature, result)
        return result

    def _keep_recording(self, signature: Signature, recording: Recording) -> None:
        with self._lock:
            self._recordings[signature] = recording
            if len(self._recordings) > _RECORDINGS_KEPT:
                self._recordings.popitem(last=False)

    @property
    def may_extend(self) -> bool:
        """Whether `extend_predictions` has something to do."""
        return self._to_extend is not None

    def extend_predictions(self) -> None:
        """Prepare predictions for sizes like those recorded last. Owner thread only; takes seconds."""
        signature, self._to_extend = self._to_extend, None
        recording = None if signature is None else self.recorded(signature)
        if signature is not None and recording is not None:
            self.predictions.extend(signature, recording, self.max_pass_bytes)

    def pass_differed(self, signature: Signature) -> None:
        """Forget what was predicted for inputs like these: a pass had other shapes."""
        self.predictions.drop(signature)
        self.differed_count += 1
        with self._lock:
            for kept in [s for s, r in self._recordings.items() if r.is_predicted]:
                del self._recordings[kept]
            self._resolved.clear()

    def needs_data(self, signature: Signature) -> bool:
        """Whether a signature is known to have no meta pass."""
        return self.meta is None or signature in self._on_data

    def _record(
        self,
        signature: Signature,
        guard: PassGuard,
        kinds: frozenset[str],
        check: Check | None,
        *,
        may_use_data: bool,
    ) -> Recording:
        before = self.recorded(signature)
        wanted = kinds | (before.kinds if before else frozenset())
        layouts = self.layouts.make(signature, guard, with_functions=bool(wanted & _OF_FUNCTIONS))

        def check_staged(recording: Recording) -> None:
            if check is not None and not kinds:  # nodes and functions are recorded later
                check(replace(_staged(self.hosted, recording), layouts=layouts))

        try:
            if self.needs_data(signature):
                raise DataNeededError
            recording = self.recorder.record(signature, wanted, guard, check_staged)
        except ServiceError:
            raise
        except DataNeededError:
            self._note_signature(signature)
            if not may_use_data:
                raise
            recording = self._record_made(signature, wanted, guard)
        except Exception as error:
            raise input_rejected(self.hosted, error, signature) from error
        return replace(_staged(self.hosted, recording), layouts=layouts)

    def _record_made(self, signature: Signature, kinds: frozenset[str], guard: PassGuard) -> Recording:
        """Record a pass on synthetic data, unless the model is known to refuse that."""
        refused = self._on_data.get(signature)
        if refused is not None:
            raise MadeDataRefusedError(refused.reason, refused.message)
        self._check_made(signature, guard)
        try:
            return self.recorder.record_made(signature, kinds, guard, self.max_pass_bytes)
        except (ServiceError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            problem = input_rejected(self.hosted, error)
            words = f"{problem.message}. This was on example data: which modules run depends on the data"
            self._note_signature(signature, ServiceError(problem.reason, words))  # without this one's frames
            raise MadeDataRefusedError(problem.reason, words) from error

    def _check_made(self, signature: Signature, guard: PassGuard) -> None:
        """Refuse a pass on made data that would need too much memory or time."""
        check_memory(made_pass_bytes(signature, self.example_signature, self.example), self.max_pass_bytes)
        work = made_pass_work(signature, self.example_signature, self.example)
        check_seconds(self.pool.pace.least_s(work), work, self.max_pass_s, guard.left_s)

    def _note_signature(self, signature: Signature, refusal: ServiceError | None = None) -> None:
        with self._lock:
            self._on_data[signature] = refusal or self._on_data.get(signature)
            while len(self._on_data) > _SIGNATURES_KEPT:
                self._on_data.popitem(last=False)

    def record_data(self, called: Called, guard: PassGuard, kinds: frozenset[str] = frozenset()) -> Recording:
        """Record a pass on the caller's own data, for data-dependent control flow; never cached.

        Raises:
            ServiceError: `PASS_TOO_LARGE`.
        """
        result = self.recorder.record_data(called, kinds, guard, self.max_pass_bytes)
        signature = signature_of_called(self.hosted, *called)
        layouts = self.layouts.make(signature, guard, with_functions=bool(kinds & _OF_FUNCTIONS))
        return replace(_staged(self.hosted, result), layouts=layouts)

    def may_differ(self, error: ServiceError, recording: Recording | None = None) -> bool:
        """Whether an error may be due to a recording's data; the example's when None."""
        if isinstance(error, MadeDataRefusedError):
            return True
        return not (recording or self.example).is_symbolic and error.reason in _DEPENDS_ON_DATA

    def resolve(
        self,
        plan: Plan,
        signature: Signature,
        recording: Recording,
        max_reply_bytes: int,
        sources: RecordedSources,
    ) -> Resolved:
        """Resolve a plan for a recorded signature; resolutions are cached.

        Args:
            plan: The request.
            signature: Of its inputs.
            recording: A pass on such inputs.
            max_reply_bytes: The most bytes of values.
            sources: The signature and recording of the inputs of each source, by name.

        Raises:
            ServiceError: See `resolve_taps` and `plan_surgery`.
        """
        key = _key(plan, signature, sources)
        with self._lock:
            result = self._resolved.get(key) if key else None
        if result is None:
            recordings = {name: source.recording for name, source in sources.items()}
            surgery = plan_surgery(plan.edits, plan.objective, recording, recordings)
            result = resolve_taps(plan.taps, recording, max_reply_bytes, surgery)
            self._keep(key, plan, result)
        else:
            checked_byte_count(result.targets, max_reply_bytes)  # a reload may have changed the limit
        return result

    def run_meta_pass(
        self, plan: Plan, resolved: Resolved, signature: Signature, sources: RecordedSources, guard: PassGuard
    ) -> Resolved:
        """Return a plan updated by the gradient meta pass, where there is one. Owner thread only.

        Raises:
            ServiceError: Errors of the objective, `NOT_DIFFERENTIABLE` among them.
        """
        if not resolved.needs_meta_pass:
            return resolved
        meta, meta_pass = self.meta, None
        if meta is not None:
            meta_pass = run_meta_pass(
                make_replica(meta), self.hosted.forward, plan, resolved, signature, guard
            )
        if meta_pass is None:
            return self._without_meta_pass(resolved, signature)
        result = resolved.after_meta_pass(meta_pass)
        self._keep(_key(plan, signature, sources), plan, result)
        return result

    def _without_meta_pass(self, resolved: Resolved, signature: Signature) -> Resolved:
        """Return what is known of a pass with gradients that has no meta pass."""
        recording = self.recorded(signature)
        if recording is None:
            return resolved
        scored = [target for target, _ in resolved.surgery.scored]
        needed = max(resolved.pass_bytes, graph_bytes(scored, recording))
        return replace(resolved, pass_bytes=needed)

    def _keep(self, key: _Key | None, plan: Plan, resolved: Resolved) -> None:
        if key is None or is_large(plan, resolved):
            return
        with self._lock:
            self._resolved[key] = resolved
            if len(self._resolved) > _RESOLVED_KEPT:
                self._resolved.popitem(last=False)


def _key(plan: Plan, signature: Signature, sources: RecordedSources) -> _Key | None:
    """Return the cache key: everything that a plan's resolution depends on; None where that is data."""
    if any(source.is_own for source in sources.values()):
        return None
    signatures = tuple((name, source.signature) for name, source in sources.items())
    return plan.taps, plan.edits, plan.negative_zeros, plan.objective, signature, signatures


def is_large(plan: Plan, resolved: Resolved) -> bool:
    """Whether a resolved request takes too much memory to be kept.

    Counted are the names that it expands to and the numbers that it contains.
    """
    expansions = (*resolved.expansions, *(names for _, names in resolved.surgery.expansions))
    steps = [step for tap in plan.taps for step in tap.reductions]
    for region in (request.edit.region for request in plan.edits):
        steps += region.takes if region.tokens is None else (*region.takes, region.tokens)
    numbers = sum(len(getattr(step, "positions", ())) for step in steps)
    numbers += sum(len(row) for step in steps for row in getattr(step, "rows", ()))
    numbers += sum(len(tap.parameters.edges) + len(tap.parameters.quantiles) for tap in plan.taps)
    terms = plan.objective.terms if plan.objective else ()
    numbers += sum(len(getattr(term.score, "classes", ())) for term in terms)
    return sum(map(len, expansions)) + numbers > _MOST_WEIGHT_KEPT


def make_deployment(
    hosted: HostedModel,
    replica_count: int,
    max_queue: int,
    *,
    is_live: bool = False,
    owner: str | None = None,
    limits: Callable[[], Limits] | None = None,
) -> Deployment:
    """Make the replicas of a model and record one pass on its example input.

    Args:
        hosted: The model.
        replica_count: The number of replicas.
        max_queue: The most calls that wait for a replica.
        is_live: See `Deployment`.
        owner: See `Deployment`.
        limits: See `Deployment`.

    Raises:
        ServiceError: `MODEL_INVALID` when the model cannot run on its example input, or a configured
            stage or warm variant is no value of that pass.
    """
    if hosted.spec.factory is not None:
        hosted.pristine.share()
    replicas = [Replica(hosted.pristine, is_live) for _ in range(replica_count)]
    recorder, recording = record_example(hosted)
    hosted = recorder.hosted
    pool = ReplicaPool(replicas, max_queue)
    deployment = Deployment(hosted, pool, recorder, _staged(hosted, recording), is_live, owner, limits=limits)
    for stage, selector in hosted.spec.stages.items():
        _check_stage(deployment, stage, selector)
    for selector in {text for wanted in hosted.spec.warm_variants for text in wanted.taps}:
        _check_warm_tap(deployment, selector)
    return deployment


def _staged(hosted: HostedModel, recording: Recording) -> Recording:
    """Add the names of the model's stages, which selectors may use."""
    stages = stages_for(hosted)
    result = {
        name: f"{text}{_first_pick(recording, text)}"
        for name, text in stages.items()
        if name in hosted.stages
    }
    return replace(recording, stages={**stages, **result, **hosted.spec.stages})


def _first_pick(recording: Recording, path: str) -> str:
    """Pick of the first tensor of a module that returns several: attention with its weights, for example."""
    record = recording.modules.get(path)
    outputs = record.calls[0].outputs if record and record.calls else []
    return next((format_picks(leaf.picks) for leaf in outputs if leaf.shape is not None), "")


def _check_stage(deployment: Deployment, stage: str, text: str) -> None:
    """Refuse a configured stage that is no value of the example's pass."""
    problem = (
        "a module of this name exists and takes precedence" if stage in deployment.example.modules else ""
    )
    try:
        selector = parse_selector(text)
        kinds = frozenset({selector.records}) & KINDS
        recording = (
            deployment.record(deployment.example_signature, kinds=kinds) if kinds else deployment.example
        )
        resolve([selector], replace(recording, stages={}))  # a stage cannot refer to another stage
    except ServiceError as error:
        problem = problem if deployment.may_differ(error) else error.message
    if problem:
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"model '{deployment.hosted.spec.model_id}': its stage '{stage}' does not work: {problem}",
        )


def _check_warm_tap(deployment: Deployment, text: str) -> None:
    """Refuse a configured warm variant of a value that the example's pass does not have."""
    try:
        selector = parse_selector(text)
        if selector.records in KINDS:
            raise ServiceError(ErrorReason.MODEL_INVALID, "values of nodes and functions always run exactly")
        resolve([selector], deployment.example)
    except ServiceError as error:
        if not deployment.may_differ(error):
            model_id = deployment.hosted.spec.model_id
            raise ServiceError(
                ErrorReason.MODEL_INVALID,
                f"model '{model_id}': its warm variant of '{text}' does not work: {error.message}",
            ) from None


def _advice(hosted: HostedModel, problem: str, signature: Signature) -> str:
    """Return what was sent and a line of NumPy that fixes it; empty where that is not clear."""
    if len(signature) != 1:
        return ""
    dtype, shape = signature[0].dtype, signature[0].shapes[0]
    is_type = "type" in problem or "Long" in problem
    if dtype.is_floating_point and "Long" in problem:
        line = '`array.astype("int64")`, as its first layer looks up embeddings'
    elif dtype.is_floating_point or is_type:
        line = input_advice(hosted, dtype, shape)
    else:  # integers, which are fine
        line = ""
    return f"{dtype_name(dtype)} of shape {shape} received: {line}" if line else ""


def input_rejected(hosted: HostedModel, error: BaseException, signature: Signature = ()) -> ServiceError:
    """Return the error of a model that failed on its inputs: its message, what it expects, and the fix."""
    if hosted.known_signature is None:
        example = f"an example input has shape ({', '.join(['batch', *map(str, hosted.input_shape)])})"
    else:
        example = str(hosted.signature)
    line = _advice(hosted, str(error), signature)
    advice = f"; {line}" if line else ""
    return ServiceError(
        ErrorReason.INPUT_REJECTED,
        f"model '{hosted.spec.model_id}' cannot take these inputs: {rejection(first_line(error))}; "
        f"{example}{advice}",
        torch=first_line(error),
    )
