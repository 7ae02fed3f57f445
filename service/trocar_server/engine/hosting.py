"""A loaded model at work: its replicas and what was recorded of its passes."""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.lease import Replica, ReplicaPool
from trocar_server.engine.plan import Signature, TapRequest, TensorSignature, split_arguments
from trocar_server.engine.planner import Resolved, resolve_taps
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, make_meta_replica, make_replica, stages_for
from trocar_server.surgery import PassGuard, Recording, parse_selector, record_calls, resolve

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")
_RECORDINGS_KEPT = 64
_RESOLVED_KEPT = 256
_DEPENDS_ON_DATA = (ErrorReason.MODULE_NOT_CALLED, ErrorReason.CALL_OUT_OF_RANGE)


@dataclass
class Host:
    """What the engine holds for one loaded model. Built and recorded on the owner thread."""

    hosted: HostedModel
    pool: ReplicaPool
    meta: nn.Module | None
    example: Recording
    _lock: Lock = field(default_factory=Lock)  # the event loop looks up what the owner thread adds
    _recordings: OrderedDict[Signature, Recording] = field(default_factory=OrderedDict)
    _resolved: OrderedDict[tuple[tuple[TapRequest, ...], Signature], Resolved] = field(
        default_factory=OrderedDict
    )

    def recorded(self, signature: Signature) -> Recording | None:
        """Return the recording of a pass on inputs of this form, if it was made."""
        with self._lock:
            found = self._recordings.pop(signature, None)
            if found is not None:
                self._recordings[signature] = found  # now the last used
            return found

    def record(self, signature: Signature, guard: PassGuard | None = None) -> Recording:
        """Record a pass on inputs of this form: without data, or on random data where that cannot be.

        Raises:
            ServiceError: `INPUT_REJECTED` when the model cannot take such inputs.
        """
        found = self.recorded(signature)
        if found is None:
            try:
                found = _staged(self.hosted, _record(self.hosted, self.meta, signature, guard or PassGuard()))
            except Exception as error:
                raise input_rejected(self.hosted, error) from error
            with self._lock:
                self._recordings[signature] = found
                if len(self._recordings) > _RECORDINGS_KEPT:
                    self._recordings.popitem(last=False)
        return found

    def record_data(self, arguments: tuple[Sequence[object], Mapping[str, object]]) -> Recording:
        """Record a pass on the caller's own data, for a model that decides on it."""
        recording = record_calls(make_replica(self.hosted.module), *arguments, is_symbolic=False)
        return _staged(self.hosted, recording)

    def may_differ(self, error: ServiceError) -> bool:
        """Whether a selector's error may be due to the data that the recording was made with."""
        return self.meta is None and error.reason in _DEPENDS_ON_DATA

    def resolve(
        self, taps: tuple[TapRequest, ...], signature: Signature, recording: Recording, max_reply_bytes: int
    ) -> Resolved:
        """Resolve taps for inputs of a form that was recorded; what was asked before is at hand.

        Raises:
            ServiceError: See `resolve_taps`.
        """
        key = taps, signature
        with self._lock:
            found = self._resolved.get(key)
        if found is None:
            found = resolve_taps(taps, recording, max_reply_bytes)
            with self._lock:
                self._resolved[key] = found
                if len(self._resolved) > _RESOLVED_KEPT:
                    self._resolved.popitem(last=False)
        return found


def make_host(hosted: HostedModel, replica_count: int, max_queue: int) -> Host:
    """Make the replicas of a model and record one pass on its example input.

    Raises:
        ServiceError: `MODEL_INVALID` when the model cannot run on its example input, or a stage that
            its configuration names is no value of that pass.
    """
    replicas = [Replica(make_replica(hosted.module)) for _ in range(replica_count)]
    meta, recording = _record_example(hosted)
    example = _staged(hosted, recording)
    _check_stages(hosted, recording)
    return Host(hosted, ReplicaPool(replicas, max_queue), meta, example)


def _staged(hosted: HostedModel, recording: Recording) -> Recording:
    """Add the names of the model's stages, which selectors may use."""
    return replace(recording, stages=stages_for(hosted.spec))


def _check_stages(hosted: HostedModel, recording: Recording) -> None:
    """Refuse a stage of the configuration that is no value of the example's pass."""
    for stage, selector in hosted.spec.stages.items():
        problem = ""
        if stage in recording.modules:
            problem = "a module has that name, and comes first"
        try:
            resolve([parse_selector(selector)], recording)
        except ServiceError as error:
            may_differ = not recording.is_symbolic and error.reason in _DEPENDS_ON_DATA
            problem = problem if may_differ else error.message
        if problem:
            raise ServiceError(
                ErrorReason.MODEL_INVALID,
                f"model '{hosted.spec.model_id}': its stage '{stage}' does not work: {problem}",
            )


def _record_example(hosted: HostedModel) -> tuple[nn.Module | None, Recording]:
    for args in _example_arguments(hosted):
        with suppress(Exception):  # detection models, among others, look at their data: no pass without it
            meta = make_meta_replica(hosted.module)
            return meta, record_calls(meta, _to_meta(args))
    problem: Exception | None = None
    for args in _example_arguments(hosted):
        try:
            return None, record_calls(make_replica(hosted.module), args, is_symbolic=False)
        except Exception as error:  # noqa: BLE001 - whatever the model raises
            problem = problem or error
    raise ServiceError(
        ErrorReason.MODEL_INVALID,
        f"model '{hosted.spec.model_id}' fails on its example input of shape {hosted.input_shape} "
        f"({first_line(problem)}); set `input_shape` in its configuration",
    ) from problem


def _example_arguments(hosted: HostedModel) -> Iterator[tuple[Any, ...]]:
    """Yield the example input, and for a custom model zeros of whole numbers too: it may take tokens."""
    args = hosted.example_inputs()
    yield args
    if hosted.spec.is_custom:
        yield tuple(torch.zeros_like(arg, dtype=torch.int64) for arg in args if isinstance(arg, torch.Tensor))


def _record(hosted: HostedModel, meta: nn.Module | None, signature: Signature, guard: PassGuard) -> Recording:
    device = "meta" if meta is not None else hosted.device
    arguments = [_fill(entry, device) for entry in signature]
    positional, keyword = split_arguments([entry.name for entry in signature], arguments)
    module = meta if meta is not None else make_replica(hosted.module)
    with guard.watching(module):
        return record_calls(module, positional, keyword, is_symbolic=meta is not None)


def _fill(entry: TensorSignature, device: torch.device | str) -> torch.Tensor | list[torch.Tensor]:
    """Return an argument of this form, with seeded values in [0, 1) on a device that has values."""
    made = entry.make(device)
    generator = torch.Generator(device).manual_seed(0) if str(device) != "meta" else None
    for tensor in made if isinstance(made, list) else [made]:
        if generator is None:
            continue
        if tensor.is_floating_point():
            tensor.uniform_(generator=generator)
        else:
            tensor.zero_()
    return made


def _to_meta(args: tuple[object, ...]) -> list[object]:
    def move(value: object) -> object:
        if isinstance(value, list):
            return [move(item) for item in value]
        return value.to("meta") if isinstance(value, torch.Tensor) else value

    return [move(value) for value in args]


def input_rejected(hosted: HostedModel, error: BaseException) -> ServiceError:
    """Say that the model failed on its inputs, with its own words and the shape that it expects."""
    shape = ", ".join(["batch", *map(str, hosted.input_shape)])
    return ServiceError(
        ErrorReason.INPUT_REJECTED,
        f"model '{hosted.spec.model_id}' cannot take these inputs: {first_line(error)}; "
        f"an example input has shape ({shape})",
    )


def first_line(error: BaseException | None) -> str:
    """Return what an error says, in one line and without the folders of this machine."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _FOLDERS.sub("", lines[0])[:300]
