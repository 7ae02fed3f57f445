"""What rules do to one gradient, against torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.sessions.gradient_changes import make_change

GRADIENT = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
NAN, INF = float("nan"), float("inf")
ODD = torch.tensor([NAN, INF, -INF, -0.0, 3.0])


@pytest.mark.parametrize(
    ("name", "options", "oracle"),
    [
        ("clamp", {"low": -0.1, "high": 0.2}, lambda g: g.clamp(-0.1, 0.2)),
        ("clamp", {"high": 0.2}, lambda g: g.clamp(max=0.2)),
        ("clamp", {"low": 0.2, "high": None}, lambda g: g.clamp(min=0.2)),
        ("scale", {"factor": -0.5}, lambda g: g * -0.5),
        ("zero", {}, torch.zeros_like),
        ("nan_to_num", {}, torch.nan_to_num),
        (
            "nan_to_num",
            {"nan": 1.0, "posinf": 5, "neginf": -5.0},
            lambda g: torch.nan_to_num(g, 1.0, 5.0, -5.0),
        ),
        ("normalise", {"max_norm": 1e6}, lambda g: g),
    ],
)
@pytest.mark.parametrize(
    "gradient", [GRADIENT, ODD, GRADIENT.bfloat16(), torch.zeros(0, 3), torch.tensor(2.0)]
)
def test_a_change_is_that_of_torch(
    name: str, options: dict[str, object], oracle: Callable[[Tensor], Tensor], gradient: Tensor
) -> None:
    if name == "normalise" and gradient is ODD:
        return  # its norm is no number: another test
    before = gradient.clone()
    changed = make_change(name, options)(gradient)
    assert torch.equal(changed.nan_to_num(), oracle(gradient).nan_to_num())
    assert torch.equal(changed.isnan(), oracle(gradient).isnan())
    assert changed.dtype == gradient.dtype
    assert torch.equal(gradient.nan_to_num(), before.nan_to_num())


def test_noise_is_drawn_from_the_present_random_numbers() -> None:
    torch.manual_seed(4)
    changed = make_change("noise", {"scale": 0.1})(GRADIENT)
    torch.manual_seed(4)
    assert torch.equal(changed, GRADIENT + 0.1 * torch.randn_like(GRADIENT))


@pytest.mark.parametrize("limit", [1e-3, 0.7, 2.0])
def test_a_norm_is_limited(limit: float) -> None:
    changed = make_change("normalise", {"max_norm": limit})(GRADIENT)
    norm = float(GRADIENT.double().norm())
    assert float(changed.double().norm()) == pytest.approx(min(limit, norm), rel=1e-6)
    assert torch.allclose(changed, GRADIENT * min(1.0, limit / norm))


def test_a_norm_of_large_finite_numbers_is_no_infinity() -> None:
    changed = make_change("normalise", {"max_norm": 1.0})(torch.tensor([3e30, -4e30]))
    assert torch.allclose(changed, torch.tensor([0.6, -0.8]))


def test_a_norm_that_is_no_number_shows() -> None:
    assert make_change("normalise", {"max_norm": 1.0})(torch.tensor([NAN, 1.0])).isnan().any()
    assert make_change("normalise", {"max_norm": 1.0})(torch.tensor([INF, 1.0])).isnan().any()
    assert not make_change("normalise", {"max_norm": 0.0})(torch.zeros(3)).any()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("clamp", {}, "clamp needs `low`, `high` or both"),
        ("clamp", {"low": 1.0, "high": -1.0}, "low 1.0 is above high -1.0"),
        ("clamp", {"low": NAN}, "low must be a finite number, not nan"),
        ("clamp", {"low": "a"}, "low must be a finite number, not 'a'"),
        ("clamp", {"low": True}, "low must be a finite number, not True"),
        ("clamp", {"low": 10**400}, "low must be a finite number"),
        ("clamp", {"lo": 1.0}, "clamp has no option 'lo'; nearest: low"),
        ("scale", {}, "scale needs the option 'factor'"),
        ("scale", {"factor": None}, "scale needs the option 'factor'"),
        ("zero", {"x": 1}, "zero has no option 'x'; available: none"),
        ("noise", {"scale": -1.0}, "scale must be at least 0"),
        ("normalise", {"max_norm": -1.0}, "max_norm must be at least 0"),
    ],
)
def test_wrong_options_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as caught:
        make_change(name, options)
    assert caught.value.reason is ErrorReason.TRAINER_INVALID
