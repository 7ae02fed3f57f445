"""What comes of one plan."""

from dataclasses import dataclass, field

from trocar_server.engine.edits import Expansions
from trocar_server.engine.passes import FeatureMap, PassResult
from trocar_server.engine.plan import Plan
from trocar_server.engine.planner import Resolved
from trocar_server.engine.transfer import Copies
from trocar_server.engines import Numerics

EAGER = "eager"
"""The engine that is PyTorch as everybody runs it."""


@dataclass(frozen=True)
class ExecutionReport:
    """How a pass was run.

    Attributes:
        numerics: What the numbers are, at least as close as was asked for.
        engine: What ran it.
        row_count: Samples of the batch that it was run in, those of other calls included; 0 where unknown.
        is_cached: Whether nothing was computed.
    """

    numerics: Numerics = Numerics.EXACT
    engine: str = EAGER
    row_count: int = 0
    is_cached: bool = False


@dataclass(frozen=True)
class Extraction:
    """The outcome of one plan."""

    feature_maps: tuple[FeatureMap, ...]
    expansions: tuple[tuple[str, ...], ...]
    stopped_at: str | None
    queue_s: float
    compute_s: float
    edit_expansions: Expansions = ()
    objective_value: float | None = None
    report: ExecutionReport = field(default_factory=ExecutionReport)
    has_drawn: bool = False
    """Whether the pass drew from torch's random numbers: then the outcome is not kept. Asked of models whose
    replies may be kept at all."""
    depth: float | None = None
    """The share of a full pass's calls that ran, from 0 to 1; None where not known."""
    copies: Copies | None = None
    """What brings the values to the host, where that may not be done; `Engine.extract` waits for it."""


def there(resolved: Resolved, result: PassResult) -> tuple[tuple[str, ...], ...]:
    """Return the names of each tap that came: of a pattern some gradients may not have."""
    names = {found.output.name for found in result.feature_maps}
    return tuple(tuple(name for name in expansion if name in names) for expansion in resolved.expansions)


def stop_depth(plan: Plan, resolved: Resolved, result: PassResult) -> float | None:
    """Return the share of a full pass's calls that ran, None for a pass that started in the middle."""
    if plan.start_at is not None:
        return None
    return 1.0 if result.stopped_at is None else resolved.depth
