"""Planner: checks a request against a model before anything is computed."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import CallCounts
from trocar_server.engine.request.plan import SENDABLE, WIDE_UNSIGNED, Signature, TapRequest
from trocar_server.engine.resolve.call_counts import calls_of, uncertain
from trocar_server.engine.resolve.differentiable import with_gradients
from trocar_server.engine.resolve.pass_memory import input_bytes, pass_bytes, reducing_bytes
from trocar_server.engine.resolve.patch_grid import input_sizes, with_grid
from trocar_server.engine.resolve.reach import edits_due, reached
from trocar_server.engine.resolve.surgery_plan import NO_SURGERY, SurgeryPlan, that_run
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.errors import ServiceError
from trocar_server.surgery import (
    Recording,
    Target,
    call_order,
    independent,
    parse_selector,
    resolve,
)
from trocar_server.surgery.axes.layout import channel_dim_of
from trocar_server.surgery.axes.token_grid import token_grids
from trocar_server.surgery.recording.recording import structure_of
from trocar_server.surgery.resolution.values import Value
from trocar_server.tensors.reductions import dtype_name, operand_specs
from trocar_server.tensors.reductions.reduction_stage import FLOAT8

_ANY_SELECTOR = parse_selector("/in")

# They are sent in the one message that describes the reply; our client accepts 16 MiB of it.
_MAX_NUMBER_BYTES = 12 << 20


@dataclass(frozen=True)
class Resolved:
    """A plan resolved for inputs of one signature.

    Attributes:
        targets: The feature maps of the reply, in order.
        expansions: The names that each tap expanded to, in the order of the request.
        byte_count: Bytes of all values wanted.
        pass_bytes: The peak bytes of the pass, without inputs and weights.
        surgery: Its resolved edits and objective.
        meta_pass: Result of the gradient meta pass; None where there was none.
        due: The names of the edited values that the pass reaches before its end.
        calls: The number of calls of modules and functions in the recorded pass, where the request depends on
            it and other data may change it: the pass then runs to its end, and is compared.
        is_counted: Whether comparing these counts is enough: not for patterns of functions.
        depth: The share of a full pass's calls that have begun when the last value is computed; None where
            nodes or functions are wanted, which have a separate call order.
    """

    targets: tuple[TapTarget, ...]
    expansions: tuple[tuple[str, ...], ...]
    byte_count: int
    pass_bytes: int = 0
    surgery: SurgeryPlan = NO_SURGERY
    meta_pass: "MetaPassResult | None" = None
    due: frozenset[str] = frozenset()
    depth: float | None = None
    calls: CallCounts = field(default_factory=dict)
    is_counted: bool = True

    @cached_property
    def is_plural(self) -> bool:
        """Whether a pattern selects gradients, some of which a pass may not compute."""
        return any(entry.target.is_gradient and entry.tap.selector.is_plural for entry in self.targets)

    @cached_property
    def only_measured(self) -> frozenset[str]:
        """The names of values of which nothing but statistics is wanted."""
        sent = {entry.target.name for entry in self.targets if entry.tap.values}
        return frozenset(entry.target.name for entry in self.targets) - sent

    @property
    def needs_meta_pass(self) -> bool:
        """Whether the pass's memory is known only from a pass with gradients."""
        return self.surgery.objective is not None and self.meta_pass is None

    def memory_bytes(self, signature: Signature, copied_bytes: int = 0) -> int:
        """Return the peak bytes of inputs of this signature and their pass; 0 for parameters alone.

        Args:
            signature: Of the inputs.
            copied_bytes: Of the tree that the pass runs on, beside the weights.
        """
        of_pass = [entry for entry in self.targets if entry.target.parameter is None]
        if not of_pass and self.surgery.objective is None:
            return self.surgery.extra_bytes
        return self.pass_bytes + self.surgery.extra_bytes + input_bytes(signature) + copied_bytes

    def after_meta_pass(self, meta_pass: "MetaPassResult") -> "Resolved":
        """Return a copy updated by a gradient meta pass.

        Raises:
            ServiceError: `NOT_DIFFERENTIABLE`, an exact selector's value gets no gradient.
        """
        targets = tuple(
            entry
            for entry in self.targets
            if not (entry.target.is_gradient and entry.target.name in meta_pass.missing)
            or not entry.tap.selector.is_plural
        )
        lost = [entry.target.name for entry in targets if entry.target.name in meta_pass.missing]
        if lost or not targets:
            raise independent(lost or sorted(meta_pass.missing))
        kept = {entry.target.name for entry in targets}
        expansions = tuple(tuple(name for name in names if name in kept) for names in self.expansions)
        return replace(
            self,
            targets=targets,
            expansions=expansions,
            byte_count=sum(target.byte_count for target in targets),
            pass_bytes=max(meta_pass.peak_bytes, reducing_bytes(targets)),
            meta_pass=meta_pass,
        )


@dataclass(frozen=True)
class MetaPassResult:
    """Result of a gradient meta pass.

    Attributes:
        peak_bytes: Its peak bytes, without inputs and weights.
        missing: The names of the gradients that were not computed.
    """

    peak_bytes: int
    missing: frozenset[str]


def resolve_taps(
    taps: Sequence[TapRequest],
    recording: Recording,
    max_reply_bytes: int,
    surgery: SurgeryPlan = NO_SURGERY,
) -> Resolved:
    """Resolve every tap and check the size of the reply.

    Raises:
        ServiceError: A selector's error, `DUPLICATE_NAME`, `INVALID_ARGUMENT` for an alias of
            several values or a statistic's scope that does not fit, or `REPLY_TOO_LARGE`.
    """
    resolved = resolve((tap.selector for tap in taps), recording)
    sizes = input_sizes(recording)
    result = [_possible(values, tap, surgery, recording) for tap, values in zip(taps, resolved, strict=True)]
    expansions = [
        [
            _tap_target((_named(target, tap, len(values)), leaf), tap, recording, sizes, index)
            for target, leaf in values
        ]
        for index, (tap, values) in enumerate(zip(taps, result, strict=True))
    ]
    targets = tuple(_unique(target for targets in expansions for target in targets))
    _check_dtypes(targets)
    byte_count = checked_byte_count(targets, max_reply_bytes)
    names = tuple(tuple(target.target.name for target in targets) for targets in expansions)
    surgery = reached(surgery, [entry.target for entry in targets], recording)
    doubtful = uncertain((*(tap.selector for tap in taps), *surgery.selectors), recording)
    return Resolved(
        targets,
        names,
        byte_count,
        pass_bytes(targets, recording),
        surgery,
        due=edits_due(surgery),
        depth=_depth([entry.target for entry in targets], surgery, recording),
        calls=calls_of(doubtful, recording, surgery.skips),
        is_counted=not any(selector.kind == "fn" and selector.is_pattern for selector in doubtful),
    )


def _tap_target(
    value: Value, tap: TapRequest, recording: Recording, sizes: Mapping[str, int], index: int
) -> TapTarget:
    target, leaf = value
    grids = token_grids(target.layout, leaf.shape or (), sizes)
    laid_out = with_grid(_laid_out(tap, target), target, grids)
    return TapTarget(target, leaf, laid_out, _type_name(target, recording), index, grids)


def _laid_out(tap: TapRequest, target: Target) -> TapRequest:
    """Return a tap with the channel dimension of a value, where that is known and the tap does not say it."""
    return replace(tap, channel_dim=channel_dim_of(target.layout, tap.channel_dim))


def _depth(targets: Sequence[Target], surgery: SurgeryPlan, recording: Recording) -> float | None:
    needed = [*targets, *(target for target, _ in surgery.scored)]
    if any(target.kind != "module" for target in needed):
        return None
    end = max((call_order(target, recording) for target in needed), default=0)
    calls = [call for record in structure_of(recording.modules).values() for call in record.calls]
    return sum(call.started <= end for call in calls) / max(1, len(calls))


def _possible(
    values: list[Value], tap: TapRequest, surgery: SurgeryPlan, recording: Recording
) -> list[Value]:
    """Leave out of a pattern values without a gradient, and those inside skipped modules."""
    if tap.selector.is_gradient:
        values = with_gradients(values, tap.selector, recording)
    return values if surgery.is_nothing else that_run(values, tap.selector, surgery)


def _type_name(target: Target, recording: Recording) -> str:
    return recording.of_kind(target.kind)[target.path].type_name


def _remedy(dtype: torch.dtype | None) -> str:
    exactly = 'cast them, cast="float16", which is exact, or ' if dtype in FLOAT8 else ""
    return f"{exactly}ask for statistics alone"


def _check_dtypes(targets: Sequence[TapTarget]) -> None:
    for target in targets:
        dtype_sent = target.outputs[0].dtype
        is_wide = target.tap.takes_wide_unsigned and dtype_sent in WIDE_UNSIGNED
        if target.tap.values and dtype_sent not in SENDABLE and not is_wide:
            dtype = str(dtype_sent) if dtype_sent is None else dtype_name(dtype_sent)
            raise ServiceError(
                ErrorReason.NOT_A_TENSOR,
                f"the values of '{target.target.name}' are {dtype}, which cannot be sent; "
                f"{_remedy(dtype_sent)}",
            )


def checked_byte_count(targets: Sequence[TapTarget], max_reply_bytes: int) -> int:
    """Return the bytes of all values, if these and the statistics are within the limits.

    Raises:
        ServiceError: `REPLY_TOO_LARGE`.
    """
    byte_count = sum(target.byte_count for target in targets)
    number_bytes = sum(target.number_bytes for target in targets)
    if byte_count + number_bytes > max_reply_bytes:
        raise _too_large(byte_count + number_bytes, max_reply_bytes, targets)
    if number_bytes > _MAX_NUMBER_BYTES:
        raise _too_many_numbers(number_bytes)
    return byte_count


def _named(target: Target, tap: TapRequest, count: int) -> Target:
    if not tap.alias:
        return replace(target, name=target.name + tap.suffix) if tap.suffix else target
    if count > 1:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"'{tap.selector.text}' stands for {count} values, and alias '{tap.alias}' can name one only; "
            "select one value, by its path, call index or pick, or leave the alias out",
            selector=tap.selector.text,
        )
    return replace(target, name=tap.alias)


def _unique(targets: Iterable[TapTarget]) -> Iterator[TapTarget]:
    """Drop a value requested twice in the same way; refuse one name for two values."""
    seen: dict[str, TapTarget] = {}
    for target in targets:
        first = seen.get(target.target.name)
        if first is not None and first.target == target.target and _wants(first) == _wants(target):
            continue
        for output in target.outputs:
            if output.name in seen:
                raise ServiceError(
                    ErrorReason.DUPLICATE_NAME,
                    f"two feature maps would be named '{output.name}'; give one of them an alias",
                    name=output.name,
                )
            seen[output.name] = target
        yield target


def _wants(target: TapTarget) -> tuple[object, ...]:
    # Constants are not part of a tap: those of two taps may differ.
    origin = target.tap_index if operand_specs(target.tap.reductions) else 0
    return replace(target.tap, selector=_ANY_SELECTOR, alias=""), origin


def check_byte_count(byte_count: int, limit: int) -> None:
    """Refuse a reply that is larger than its recording predicted.

    Raises:
        ServiceError: `REPLY_TOO_LARGE`.
    """
    if byte_count > limit:
        raise ServiceError(
            ErrorReason.REPLY_TOO_LARGE,
            f"the feature maps are {byte_count:,} bytes, the limit is {limit:,}; ask for fewer taps "
            "or a smaller batch, or for statistics without values",
            byte_count=str(byte_count),
            limit=str(limit),
        )


def _too_large(byte_count: int, limit: int, targets: Iterable[TapTarget]) -> ServiceError:
    sizes = {target.target.name: target.byte_count + target.number_bytes for target in targets}
    largest = max(sizes, key=sizes.__getitem__)
    return ServiceError(
        ErrorReason.REPLY_TOO_LARGE,
        f"the feature maps would be {byte_count:,} bytes, the limit is {limit:,}; the largest is "
        f"'{largest}' with {sizes[largest]:,}. Nothing was computed. Ask for fewer taps "
        "or a smaller batch, or for statistics without values",
        byte_count=str(byte_count),
        limit=str(limit),
    )


def _too_many_numbers(byte_count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.REPLY_TOO_LARGE,
        f"the statistics and scales would be {byte_count:,} bytes, the limit is {_MAX_NUMBER_BYTES:,}. "
        "Nothing was computed. Ask for fewer taps or statistics, for scope 'all', or for one scale",
        byte_count=str(byte_count),
        limit=str(_MAX_NUMBER_BYTES),
    )
