"""Gradient edits over sets of parameters, and on accumulated gradients: both act on `Parameter.grad`.

    changed = apply_to_sums(rules, parameters, "batch")    # after the backward pass

# Note: [Rules over sets run after the backward pass]
`register_multi_grad_hook` reports several gradients at once but cannot change them. A rule over a set has
to. So it acts after the backward pass, on that pass's gradients, before they are added to those of earlier
batches. At a value of the pass this is impossible: its gradient has already been propagated.

# Note: [Rules on accumulated gradients]
`when="accumulated"` acts as `register_post_accumulate_grad_hook` does: on the running sum, after each
backward pass, and only at parameters that the pass has added to.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.sessions.gradient_changes import check_options

SetChange = Callable[[Sequence[Tensor]], list[Tensor]]
"""Returns a new tensor for each, of the same shape, dtype and device."""

SETS = ("clip_norm_of_all", "zero_if")
"""The rules that act on a set of gradients together."""
_MODES = ("all", "any")


def make_set_change(name: str, options: Mapping[str, object]) -> SetChange:
    """Return the change of a rule over a set, by name.

    `clip_norm_of_all` (`max_norm`): all times max_norm / norm where the Euclidean norm of all together,
    computed in float64, is over it. `zero_if` (`above`, `below`: of that norm; `nonfinite`: true; `mode`):
    zeros for all where one of its conditions is true, with mode `all` of the set together, with `any` of a
    single gradient. Norms that are NaN are neither above nor below.

    Raises:
        ServiceError: `TRAINER_INVALID`, an unknown option, a missing one, or one of another kind.
    """
    if name == "clip_norm_of_all":
        numbers = check_options(name, options, ("max_norm",), ("max_norm",))
        _check_norm("max_norm", numbers)
        return lambda gradients: _clip_all(gradients, numbers["max_norm"])
    mode, nonfinite = options.get("mode", "all"), options.get("nonfinite", False)
    if mode not in _MODES:
        raise _invalid(f"zero_if: mode must be 'all' or 'any', not {mode!r}")
    if not isinstance(nonfinite, bool):
        raise _invalid(f"zero_if: nonfinite must be true or false, not {nonfinite!r}")
    bounds = {key: value for key, value in options.items() if key not in ("mode", "nonfinite")}
    numbers = check_options(name, bounds, ("above", "below", "nonfinite", "mode"), ())
    for bound in numbers:
        _check_norm(bound, numbers)
    if not numbers and not nonfinite:
        raise _invalid("zero_if needs a condition: `above`, `below` or `nonfinite`")
    return lambda gradients: _zero_if(gradients, numbers, nonfinite=nonfinite, is_any=mode == "any")


def each(change: Callable[[Tensor], Tensor]) -> SetChange:
    """Lift a change of one gradient to a set."""
    return lambda gradients: [change(gradient) for gradient in gradients]


def apply_to_sums(
    rules: Mapping[int, tuple[SetChange, Collection[str]]],
    parameters: Mapping[str, nn.Parameter],
    present: Collection[str],
) -> dict[int, Tensor | int]:
    """Change `Parameter.grad` by rules, in order; the old gradient tensors are not written to.

    Args:
        rules: By position: the change, and the names of the parameters whose gradients it changes.
        parameters: By name.
        present: Names of the parameters that got a gradient.

    Returns:
        Number of elements that each rule has changed; NaN that stays NaN is not counted.
    """
    changed: dict[int, Tensor | int] = {}
    for position, (change, names) in rules.items():
        wanted = [parameters[name] for name in names if name in present]
        before = [parameter.grad for parameter in wanted if parameter.grad is not None]
        count: Tensor | int = 0
        with torch.no_grad():
            for parameter, old, new in zip(wanted, before, change(before) if before else [], strict=True):
                count = count + ((new != old) & ~(new.isnan() & old.isnan())).sum()
                parameter.grad = new
        changed[position] = count
    return changed


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of gradients together, in float64: squares of large numbers stay finite."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    together: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return together


def _clip_all(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    norm = _norm(gradients)
    factor = torch.where(norm > limit, limit / norm, 1.0)
    return [(gradient.double() * factor).to(gradient.dtype) for gradient in gradients]


def _zero_if(
    gradients: Sequence[Tensor], bounds: Mapping[str, float], *, nonfinite: bool, is_any: bool
) -> list[Tensor]:
    groups = [[gradient] for gradient in gradients] if is_any else [gradients]
    holds = torch.stack([_holds(group, bounds, nonfinite=nonfinite) for group in groups]).any()
    return [torch.where(holds, torch.zeros_like(gradient), gradient) for gradient in gradients]


def _holds(gradients: Sequence[Tensor], bounds: Mapping[str, float], *, nonfinite: bool) -> Tensor:
    norm = _norm(gradients)
    holds = torch.zeros_like(norm, dtype=torch.bool)
    if "above" in bounds:
        holds = holds | (norm > bounds["above"])
    if "below" in bounds:
        holds = holds | (norm < bounds["below"])
    if nonfinite:
        holds = holds | torch.stack([~torch.isfinite(gradient).all() for gradient in gradients]).any()
    return holds


def _check_norm(option: str, numbers: Mapping[str, float]) -> None:
    if numbers[option] < 0:
        raise _invalid(f"{option} must be at least 0, not {numbers[option]}")


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
