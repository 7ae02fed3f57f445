"""Pass of the health report, with asyncio; `tools/generate_sync.py` generates the sync one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trocar._analysis.analysis_taps import names_of
from trocar._analysis.health_rows import health_of
from trocar._analysis.health_taps import (
    gradient_taps,
    gradients_of_parameters,
    norms_of_parameters,
    owners_of,
    taps_of_parameters,
)
from trocar._analysis.ordering import in_execution_order
from trocar._async.analysis_passes import executed
from trocar.errors import (
    NotDifferentiableError,
    NotFoundError,
    SelectorError,
    TrocarError,
    UnknownParameterError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._analysis.analysis_taps import Taps
    from trocar._analysis.health import Health, HealthThresholds
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.gradients import AsyncGradients
    from trocar._request.inputs import Inputs
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps


async def health(
    extraction: AsyncExtraction,
    gradients: AsyncGradients,
    model_id: str,
    inputs: Inputs,
    at: Taps,
    thresholds: HealthThresholds,
    **options: Any,
) -> Health:
    """Pass of `AsyncAnalyses.health`; `options` are those of `gradients`."""
    taps = gradient_taps(at)
    owners = [owner for owner in owners_of(taps) if await _has_own(extraction, model_id, owner)]
    maps = None
    while maps is None:
        try:
            maps = await gradients.gradients(
                model_id, inputs, at=taps, taps=taps_of_parameters(owners), **options
            )
        except (UnknownParameterError, NotDifferentiableError) as error:  # nothing was computed
            owners = _without(owners, error)
    names = await _ordered(extraction, model_id, taps, maps) if len(taps) > 1 else None
    return health_of(maps, taps, owners, thresholds, names)


async def _has_own(extraction: AsyncExtraction, model_id: str, owner: str) -> bool:
    """Whether modules have parameters or buffers of their own."""
    try:
        await extraction.plan(model_id, None, norms_of_parameters(owner))
    except (SelectorError, NotFoundError):  # the pass will report an error of the selector itself
        return False
    return True


def _without(owners: Sequence[str], error: TrocarError) -> list[str]:
    """Return the owners without the one that the error names.

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
    extraction: AsyncExtraction, model_id: str, taps: Sequence[Tap], maps: FeatureMaps
) -> Sequence[str]:
    names = names_of(taps, maps.info, maps.expansions)
    return in_execution_order(names, maps.info, await executed(extraction, model_id))
