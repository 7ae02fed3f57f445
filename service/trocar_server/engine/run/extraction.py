"""Extraction: the result of one plan."""

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.resolve.edit_resolution import Expansions
from trocar_server.engine.resolve.planner import Resolved, check_byte_count
from trocar_server.engine.run.forward_pass import FeatureMap, PassResult
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.transfer import Copies, this_thread
from trocar_server.processing.inputs import ProcessedInput

EAGER = "eager"
"""The backend name of unmodified PyTorch."""


@dataclass(frozen=True)
class ExecutionReport:
    """Execution report of a pass.

    Attributes:
        numerics: Numerics of the values, at least as strict as requested.
        engine: The backend that ran it.
        row_count: Samples of the batch that it was run in, those of other calls included; 0 where unknown.
        is_cached: Whether nothing was computed.
        asked: The loosest numerics that the caller accepts, or the model's default.
        reason: Why it is stricter than that; empty where it is not.
        stateful: Whether the model keeps state from pass to pass; see Note: [Two equal passes] in
            `engine.host.repeatable`.
    """

    numerics: Numerics = Numerics.EXACT
    engine: str = EAGER
    row_count: int = 0
    is_cached: bool = False
    asked: Numerics = Numerics.EXACT
    reason: str = ""
    stateful: bool = False


@dataclass(frozen=True)
class Extraction:
    """Result of one plan."""

    feature_maps: tuple[FeatureMap, ...]
    expansions: tuple[tuple[str, ...], ...]
    stopped_at: str | None
    queue_s: float
    compute_s: float
    edit_expansions: Expansions = ()
    objective_value: float | None = None
    report: ExecutionReport = field(default_factory=ExecutionReport)
    has_drawn: bool = False
    """Whether the pass drew from torch's random generators: then the reply is not cached. Checked only for
    models whose replies may be cached at all."""
    depth: float | None = None
    """The share of a full pass's calls that ran, from 0 to 1; None where not known."""
    copies: Copies | None = None
    """Pending copies of the values to the host, or None; `Engine.extract` waits for them."""

    processed: tuple[ProcessedInput, ...] = ()
    """What the model's processor made of texts and sound."""

    @cached_property
    def payloads(self) -> tuple[memoryview, ...]:
        """The values of the reply."""
        found = []
        for feature_map in self.feature_maps:
            if feature_map.values is not None:
                found.append(feature_map.values.data)
        return tuple(found)

    @cached_property
    def byte_count(self) -> int:
        """Bytes of the values of the reply."""
        return sum(map(attrgetter("nbytes"), self.payloads))


def finished(
    checked: CheckedPlan,
    resolved: Resolved,
    result: PassResult,
    report: ExecutionReport,
    queue_s: float,
    statistics: StreamStatistics | None = None,
) -> Extraction:
    """Return the result of a pass, whatever ran it. Owner thread only, right after the pass.

    Args:
        checked: The request.
        resolved: What it meant for the model.
        result: Of the pass.
        report: How it was run.
        queue_s: Seconds of waiting.
        statistics: Takes the statistics, all or none; the extraction is then without them.

    Raises:
        ServiceError: `REPLY_TOO_LARGE`, as the size may depend on the data; see `StreamStatistics.add`.
    """
    if result.byte_count > checked.limits.max_reply_bytes:
        check_byte_count(result.byte_count, checked.limits.max_reply_bytes)
    transfers = this_thread.transfers
    depth = 1.0 if result.stopped_at is None else resolved.depth
    return Extraction(
        statistics.add(result) if statistics else result.feature_maps,
        collected_names(resolved, result) if resolved.is_plural else resolved.expansions,
        result.stopped_at,
        queue_s,
        result.compute_s,
        resolved.surgery.expansions,
        result.objective,
        report,
        result.has_drawn,
        depth if checked.plan.start_at is None else None,  # it began in the middle
        transfers.take() if transfers.has_begun else None,
    )


def collected_names(resolved: Resolved, result: PassResult) -> tuple[tuple[str, ...], ...]:
    """Return the names of each tap's collected values.

    A pattern may match values that got no gradient; these are left out. Other selectors stand for values that
    are collected or an error.
    """
    names = {found.output.name for found in result.feature_maps}
    return tuple(tuple(name for name in expansion if name in names) for expansion in resolved.expansions)
