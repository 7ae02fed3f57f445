"""Extraction: the result of one plan."""

from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

from trocar_server.engine.execute.eager import EAGER
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.resolve.edit_resolution import Expansions
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.run.pass_result import FeatureMap, PassResult
from trocar_server.engine.transfer import Copies
from trocar_server.processing.inputs import ProcessedInput


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
        outcome = []
        for feature_map in self.feature_maps:
            if feature_map.values is not None:
                outcome.append(feature_map.values.data)
        return tuple(outcome)

    @cached_property
    def byte_count(self) -> int:
        """Bytes of the values of the reply."""
        return sum(map(attrgetter("nbytes"), self.payloads))


def collected_names(resolved: Resolved, result: PassResult) -> tuple[tuple[str, ...], ...]:
    """Return the names of each tap's collected values.

    A pattern may match values that got no gradient; these are left out. Other selectors stand for values that
    are collected or an error.
    """
    names = {outcome.output.name for outcome in result.feature_maps}
    return tuple(tuple(name for name in expansion if name in names) for expansion in resolved.expansions)
