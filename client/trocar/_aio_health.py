"""The pass behind the health report for asyncio; `tools/generate_sync.py` makes the sync one of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trocar._aio_analysis import executed
from trocar._analysis.health_rows import health_of
from trocar._analysis.health_taps import (
    gradient_taps,
    gradients_of_parameters,
    norms_of_parameters,
    owners_of,
    taps_of_parameters,
)
from trocar._analysis.ordering import in_execution_order
from trocar._analysis.taps import names_of
from trocar.errors import (
    NotDifferentiableError,
    NotFoundError,
    SelectorError,
    TrocarError,
    UnknownParameterError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._aio_gradients import AsyncGradients
    from trocar._analysis.health import Health, HealthThresholds
    from trocar._analysis.taps import Taps
    from trocar._edits import Edit
    from trocar._feature_maps import FeatureMaps
    from trocar._inputs import Inputs
    from trocar._objectives import Objective
    from trocar._taps import Tap


async def health(
    client: AsyncGradients,
    model_id: str,
    inputs: Inputs,
    of: Objective,
    at: Taps,
    thresholds: HealthThresholds,
    edits: str | Edit | Sequence[str | Edit],
    timeout_s: float | None,
) -> Health:
    """Do the work of `AsyncAnalyses.health`."""
    taps = gradient_taps(at)
    owners = [owner for owner in owners_of(taps) if await _has_own(client, model_id, owner)]
    options: dict[str, Any] = {"of": of, "at": taps, "edits": edits, "timeout_s": timeout_s}
    maps = None
    while maps is None:
        try:
            maps = await client.gradients(model_id, inputs, taps=taps_of_parameters(owners), **options)
        except (UnknownParameterError, NotDifferentiableError) as error:  # nothing was computed
            owners = _without(owners, error)
    names = await _ordered(client, model_id, taps, maps) if len(taps) > 1 else None
    return health_of(maps, taps, owners, thresholds, names)


async def _has_own(client: AsyncGradients, model_id: str, owner: str) -> bool:
    """Whether modules have parameters or buffers of their own."""
    try:
        await client.plan(model_id, None, norms_of_parameters(owner))
    except (SelectorError, NotFoundError):  # what is wrong with the selector itself, the pass will say
        return False
    return True


def _without(owners: Sequence[str], error: TrocarError) -> list[str]:
    """Return the owners without the one that an error is about.

    It has buffers alone, or its parameters have no gradient.

    Raises:
        TrocarError: It is about none of them.
    """
    selector, name = error.details.get("selector"), error.details.get("name", "")
    kept = [
        owner
        for owner in owners
        if gradients_of_parameters(owner).selector != selector and not name.startswith(f"{owner}/param_grad(")
    ]
    if len(kept) == len(owners):
        raise error
    return kept


async def _ordered(
    client: AsyncGradients, model_id: str, taps: Sequence[Tap], maps: FeatureMaps
) -> Sequence[str]:
    names = names_of(taps, maps.info, maps.expansions)
    return in_execution_order(names, maps.info, await executed(client, model_id))
