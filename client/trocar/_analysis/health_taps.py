"""Health report taps: gradients at values, and of the parameters of the modules behind them."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from trocar._analysis.analysis_taps import as_taps
from trocar._analysis.ordering import EVERYTHING
from trocar._request.taps import Tap, tap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._analysis.analysis_taps import Taps
    from trocar._request.statistic_options import StatisticName

ROOT = ""
"""The path of the model itself, which no pattern matches."""

_GRADIENT_STATISTICS: tuple[StatisticName, ...] = ("l2", "zero_fraction", "nan_count", "inf_count")
_REGEX, _NO_MODULES = "re:", ("fx:", "fn:")
_PARTS = re.compile(r'((?:"(?:\\.|[^"\\])*"|[^"@#/\[])*)(?:@[^#/\[]*)?(#[^/\[]*)?(/param)?')
"""What a selector says of modules; order; whether a parameter is meant."""


def gradient_taps(at: Taps) -> list[Tap]:
    """Return taps that take statistics of gradients and leave the values on the server.

    Raises:
        ValueError: There is none, one has its own reductions, or one is of parameters.
        TypeError: Something is neither a selector nor a tap.
    """
    chosen = as_taps(at)
    for item in chosen:
        if item.reduce:
            raise ValueError(f"the tap {item.selector!r} has reductions; norms need the whole gradient")
        if _parts(item.selector)[2]:
            raise ValueError(
                f"{item.selector!r} selects parameters, which have no rows; select their module, whose row "
                "has their numbers"
            )
    return [Tap(item.selector, alias=item.alias, stats=_GRADIENT_STATISTICS, values=False) for item in chosen]


def owners_of(taps: Sequence[Tap]) -> list[str]:
    """Return selectors of the modules whose own parameters belong to the rows.

    With everything the model's own belong to them. Places in execution order, `#3:7`, have none: there is no
    selector for the parameters of modules at such places.
    """
    result: list[str] = []
    for item in taps:
        path, order, _ = _parts(item.selector)
        if order is None and not item.selector.startswith(_NO_MODULES):
            result += [path, ROOT] if path == EVERYTHING else [path]
    return list(dict.fromkeys(result))


def gradients_of_parameters(owner: str) -> Tap:
    """Return the tap of the gradients of all own parameters of what `owner` selects."""
    return tap(f"{owner}/param_grad(*)", stats=_GRADIENT_STATISTICS, values=False)


def norms_of_parameters(owner: str) -> Tap:
    """Return the tap of the norms of all own parameters and buffers of what `owner` selects."""
    return tap(f"{owner}/param(*)", stats=["l2"], values=False)


def taps_of_parameters(owners: Sequence[str]) -> list[Tap]:
    """Return both taps of every owner."""
    return [make(owner) for owner in owners for make in (gradients_of_parameters, norms_of_parameters)]


def _parts(selector: str) -> tuple[str, str | None, str | None]:
    """Return a selector's module part, its order, and its port if that is a parameter."""
    expression = selector.removeprefix(_REGEX)
    if expression != selector and not expression.startswith('"'):  # it takes the entire rest
        return f"{_REGEX}{json.dumps(expression, ensure_ascii=False)}", None, None
    matched = _PARTS.match(selector)
    assert matched is not None  # every part may be empty
    return matched[1], matched[2], matched[3]
