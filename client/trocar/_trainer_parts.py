"""Parts of a trainer: heads, gradient rules, saved tensors. The server checks them, all problems at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trocar._trainer_options import Selectors, flag, number, options_to_wire, selectors, text, whole
from trocar_api.v1 import trainer_pb2 as pb


@dataclass(frozen=True)
class Head:
    """A new classifier; made by `head`."""

    classes: int
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0
    init: str = "default"
    bias: bool = True
    path: str = ""

    def to_wire(self) -> pb.HeadSpec:
        """Return the message."""
        return pb.HeadSpec(
            path=text("path", self.path),
            classes=whole("classes", self.classes, bits=32),
            hidden=[whole("hidden", width, bits=32) for width in self.hidden],
            dropout=number("dropout", self.dropout),
            init=text("init", self.init),
            bias=flag("bias", self.bias),
        )


def head(
    classes: int,
    *,
    hidden: Sequence[int] = (),
    dropout: float = 0.0,
    init: str = "default",
    bias: bool = True,
    path: str = "",
) -> Head:
    """Return a new classifier for `Client.train`.

        client.train("resnet18", head=trocar.head(10, hidden=[256], dropout=0.1))

    Args:
        classes: Its outputs.
        hidden: Widths of hidden layers, each followed by a ReLU; none for a single Linear.
        dropout: Probability of dropout before each layer.
        init: "default" (torch's own), "zeros", "normal" (deviation 0.01), "xavier" or "kaiming" (uniform).
        bias: Whether its layers have biases.
        path: The module that it takes the place of; the server finds the classifier when empty.
    """
    return Head(classes, tuple(hidden), dropout, init, bias, path)


@dataclass(frozen=True)
class GradientRule:
    """A declared change to gradients; made by `clamp` or `gradient_rule`."""

    selector: str
    name: str
    options: Mapping[str, object]

    def to_wire(self) -> pb.GradientRuleSpec:
        """Return the message."""
        return pb.GradientRuleSpec(
            selector=text("selector", self.selector),
            name=text("name", self.name),
            options=options_to_wire(self.options),
        )


def gradient_rule(selector: str, name: str, **options: object) -> GradientRule:
    """Return a change to gradients.

    Args:
        selector: Parameters ("fc.*", "layer4", "fc.bias") or the gradient at a value ("layer4/grad_out").
        name: "clamp" (low, high), "scale" (factor), "zero", "noise" (std), "nan_to_num" (nan, posinf, neginf)
            or "norm_limit" (limit: the most Euclidean norm of each tensor).
        **options: As said there.
    """
    return GradientRule(selector, name, options)


def clamp(selector: str, low: float | None = None, high: float | None = None) -> GradientRule:
    """Return the rule that clamps each element of gradients: `clamp("fc.*", -0.1, 0.1)`. NaN stays NaN.

    Args:
        selector: As in `gradient_rule`.
        low: The least value; no limit when None.
        high: The largest value; no limit when None.
    """
    limits = {"low": low, "high": high}
    return gradient_rule(
        selector, "clamp", **{name: limit for name, limit in limits.items() if limit is not None}
    )


@dataclass(frozen=True)
class SavedTensors:
    """Where what autograd saves lies; made by `spool` or `host_memory`."""

    store: str
    budget_bytes: int = 256 << 20
    modules: tuple[str, ...] = ()
    min_bytes: int = 32 << 10
    store_dtype: str = ""

    def to_wire(self) -> pb.SavedTensorsSpec:
        """Return the message."""
        return pb.SavedTensorsSpec(
            store=self.store,
            budget_bytes=whole("budget_bytes", self.budget_bytes),
            modules=self.modules,
            min_bytes=whole("min_bytes", self.min_bytes),
            store_dtype=text("store_dtype", self.store_dtype),
        )


def spool(
    budget_bytes: int = 256 << 20,
    *,
    modules: Selectors = (),
    min_bytes: int = 32 << 10,
    store_dtype: str = "",
) -> SavedTensors:
    """Keep what autograd saves within a budget in memory, and the rest on the server's disk.

    Args:
        budget_bytes: The most bytes in memory.
        modules: Only what these modules save; all when empty.
        min_bytes: Smaller tensors stay in memory.
        store_dtype: "bf16" or "int8" for less precision on disk; exact when empty.
    """
    return SavedTensors("spool", budget_bytes, tuple(selectors(modules, "modules")), min_bytes, store_dtype)


def host_memory() -> SavedTensors:
    """Keep what autograd saves in the host's memory instead of the GPU's."""
    return SavedTensors("host")
