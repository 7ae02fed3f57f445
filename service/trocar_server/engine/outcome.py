"""What comes of one plan."""

from dataclasses import dataclass

from trocar_server.engine.edits import Expansions
from trocar_server.engine.passes import FeatureMap, PassResult
from trocar_server.engine.planner import Resolved


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
    has_drawn: bool = False
    """Whether the pass drew from torch's random numbers: then the outcome is not kept."""


def there(resolved: Resolved, result: PassResult) -> tuple[tuple[str, ...], ...]:
    """Return the names of each tap that came: of a pattern some gradients may not have."""
    names = {found.output.name for found in result.feature_maps}
    return tuple(tuple(name for name in expansion if name in names) for expansion in resolved.expansions)
