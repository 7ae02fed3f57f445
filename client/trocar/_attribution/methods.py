"""Attribution methods and their options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from trocar._base.names import name_hint, unknown_name
from trocar._request.operands import integer, number
from trocar_api.value_words import not_one_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._attribution.cam import Grid


@dataclass(frozen=True)
class Saliency:
    """The gradient (Simonyan et al. 2013)."""

    abs: bool = True
    """Whether absolute values are returned."""


@dataclass(frozen=True)
class InputXGradient:
    """The value times its gradient."""


@dataclass(frozen=True)
class IntegratedGradients:
    """The gradient's mean along the straight path from a baseline, times (input - baseline)."""

    baseline: Any = 0.0
    """A number, or an array that is broadcast to the inputs."""
    steps: int = 50
    """Points of the Gauss-Legendre rule."""
    delta: bool = False
    """Whether `Attribution.delta` is wanted, which takes one pass more."""

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)


@dataclass(frozen=True)
class SmoothGrad:
    """The mean of another method over noisy copies of the inputs."""

    over: Saliency | InputXGradient | IntegratedGradients
    """The other method."""
    samples: int = 25
    """Copies of each input."""
    sigma: float = 1.0
    """Standard deviation of the noise, in the units of the model's input."""
    seed: int = 0
    """Of the noise, 0 or more."""

    def __post_init__(self) -> None:
        _check_count("samples", self.samples)
        if number("sigma", self.sigma) < 0:
            raise ValueError(f"sigma={self.sigma!r} must be 0 or a positive number")
        if integer("seed", self.seed) < 0:
            raise ValueError(f"seed={self.seed!r} must be 0 or a positive number")


@dataclass(frozen=True)
class GradCam:
    """Channels weighted by their mean gradient."""

    channel_dim: int | None = None
    """The dimension of the channels; where the model has them when None."""
    grid: Grid = None
    """How tokens become positions; see `trocar._attribution.cam.channels_first`."""


@dataclass(frozen=True)
class GradCamPlusPlus(GradCam):
    """Channels weighted as in Chattopadhyay et al. 2018."""


@dataclass(frozen=True)
class LayerConductance:
    """The flow through each element of a feature map along the path from a baseline."""

    baseline: Any = 0.0
    """A number, or an array that is broadcast to the inputs."""
    steps: int = 50
    """Differences between points of the Gauss-Legendre rule."""
    delta: bool = False
    """Whether `Attribution.delta` is wanted, which takes one pass more."""
    channel_dim: int | None = None
    """For the heat map: the dimension of the channels."""
    grid: Grid = None
    """For the heat map: how tokens become positions."""

    def __post_init__(self) -> None:
        _check_count("steps", self.steps)


@dataclass(frozen=True)
class GuidedBackprop:
    """The gradient, of which each ReLU lets only positive parts pass (Springenberg et al. 2014)."""

    relus: str | Sequence[str] = "**:ReLU"
    """Where the ReLUs are."""


@dataclass(frozen=True)
class Occlusion:
    """The drop of the score when a window of the input is replaced."""

    window: int | tuple[int, ...] | None = None
    """A size along height and width, or one for each dimension of a sample; a 14th of the input when None."""
    stride: int | tuple[int, ...] | None = None
    """A distance along every dimension, or one for each; half a window when None."""
    baseline: Any = 0.0
    """What stands in a window: a number, or an array that is broadcast to the inputs."""


Options: TypeAlias = (
    Saliency
    | InputXGradient
    | IntegratedGradients
    | SmoothGrad
    | GradCam
    | GradCamPlusPlus
    | LayerConductance
    | GuidedBackprop
    | Occlusion
)

METHODS: dict[str, type[Options]] = {
    "saliency": Saliency,
    "input_x_gradient": InputXGradient,
    "integrated_gradients": IntegratedGradients,
    "smoothgrad": SmoothGrad,
    "grad_cam": GradCam,
    "grad_cam_plus_plus": GradCamPlusPlus,
    "layer_conductance": LayerConductance,
    "guided_backprop": GuidedBackprop,
    "occlusion": Occlusion,
}
"""Every method by name."""

SMOOTHED = ("saliency", "input_x_gradient", "integrated_gradients")
"""What SmoothGrad goes over."""
AT_INPUT_ONLY = (IntegratedGradients, Occlusion)
"""What is attributed to the model's input alone."""
AT_MODULE = (GradCam, GradCamPlusPlus, LayerConductance)
"""What is attributed to a value in the model."""


def method_options(method: str, given: Mapping[str, Any]) -> Options:
    """Check the name and the options of a method.

    Raises:
        TypeError: The method has no such option.
        ValueError: There is no such method, or an option is out of range.
    """
    if method not in METHODS:
        raise ValueError(unknown_name("method", method, METHODS).args[0])
    if METHODS[method] is SmoothGrad:
        return _smoothgrad(given)
    chosen: Options = _filled(method, METHODS[method], given)
    return chosen


def _smoothgrad(given: Mapping[str, Any]) -> SmoothGrad:
    """Options that are not SmoothGrad's belong to the method that it averages."""
    own = {name: given[name] for name in ("samples", "sigma", "seed") if name in given}
    over = given.get("over", "saliency")
    if over not in SMOOTHED:
        raise ValueError(f"over {not_one_of(over, SMOOTHED)}")
    rest = {name: value for name, value in given.items() if name not in ("over", *own)}
    if rest.get("delta"):
        raise ValueError("delta is not available with smoothgrad")
    base = _filled(over, METHODS[over], rest)
    assert isinstance(base, (Saliency, InputXGradient, IntegratedGradients))  # as SMOOTHED says
    return SmoothGrad(base, **own)


def _filled(method: str, kind: type[Any], given: Mapping[str, Any]) -> Any:
    names = [field.name for field in fields(kind)]
    unknown = [name for name in given if name not in names]
    if unknown:
        hint = name_hint(unknown[0], names)
        raise TypeError(f"{method} has no option {unknown[0]!r}; {hint}")
    return kind(**given)


def _check_count(name: str, value: object) -> None:
    if integer(name, value) < 1:
        raise ValueError(f"{name}={value!r} must be 1 or more")
