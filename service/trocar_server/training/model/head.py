"""Classifier head of a model: finding and replacing it.

    recording = record_calls(meta_model, (meta_images,))
    replace_head(model, HeadSpec(classes=10), seed=0, recording=recording)

# Note: [Finding the head]
The last module of a pass that has parameters of its own, when it is a linear layer or a 1x1 convolution and
a dimension of the model's output is as wide: the layer knows where its own classes are. Without a recorded
pass: the last such layer in order of registration, which is right for all of torchvision's classification
models.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest
from trocar_server.surgery import Leaf, ModuleRecord, Recording
from trocar_server.surgery.axes.layout import class_dim_of
from trocar_server.training.model.text_head import add_text_head
from trocar_server.training.spec.trainer_spec import HeadSpec

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
MAX_PARAMETERS = 1 << 28
"""The most parameters of a new head."""
_ADVICE = "name the module in `head.path`"
_LOGITS = ("logits",)


def find_head(module: nn.Module, recording: Recording | None = None) -> str:
    """Return the path of a model's classifier. See Note: [Finding the head].

    Args:
        module: The model.
        recording: A recorded pass of it.

    Raises:
        ServiceError: `TRAINER_INVALID`, no classifier was found, or its weights are tied.
    """
    path = _last_layer(module) if recording is None else _last_called(module, recording)
    if not path:
        raise _invalid(f"the model is a single layer and has no head; {_ADVICE}")
    tied = _tied_to(module, path)
    if tied:
        raise _invalid(
            f"the head '{path}' shares its weights with '{tied}', and a new head could not share them; "
            f"{_ADVICE}"
        )
    return path


def replace_head(module: nn.Module, spec: HeadSpec, seed: int, recording: Recording | None = None) -> str:
    """Replace the head of a model, or add one behind a model of texts, and return its path.

    The head is created on the CPU after `torch.manual_seed(seed)`: first its layers in order, then, unless
    `init` is `default`, their weights in order. It has the dtype and the device of the old head, or of the
    model where the old head has no weights (`nn.Identity`). Torch's global random state is unaffected.

    Args:
        module: The model, changed in place.
        spec: Spec of the new head.
        seed: Seed of its initial weights.
        recording: A recorded pass of the model; without one only layers can be replaced, not containers.

    Raises:
        ServiceError: `TRAINER_INVALID`, no head was found, there is no such module, or its type cannot
            be replaced.
    """
    if spec.of:
        return add_text_head(module, spec.of, lambda width: _new_layers(module, width, spec, seed))
    path = spec.path or find_head(module, recording)
    old = _module_at(module, path)
    every = module.named_modules(remove_duplicate=False)
    places: list[str] = [place for place, part in every if part is old]
    path = places[0]
    new = _made(module, old, spec, seed, path, recording)
    new.train(old.training)
    for place in places:
        parent, _, name = place.rpartition(".")
        setattr(module.get_submodule(parent), name, new)
    return path


def _last_called(module: nn.Module, recording: Recording) -> str:
    modules: dict[str, nn.Module] = dict(module.named_modules())
    called: list[ModuleRecord] = [
        record
        for path, record in recording.modules.items()
        if record.calls and path in modules and any(True for _ in modules[path].parameters(recurse=False))
    ]
    if not called:
        raise _invalid(f"the model calls no module with weights; {_ADVICE}")
    record = max(called, key=lambda record: record.calls[-1].started)
    sizes, layer = _output_sizes(recording), modules[record.path]
    if not _is_layer(layer) or _width(layer) not in sizes:
        raise _invalid(
            f"the head was not found: the last module with weights is '{record.path}' "
            f"({record.type_name}), which "
            f"is not a linear layer that returns the model's output; {_ADVICE}"
        )
    return record.path


def class_counts(recording: Recording) -> set[int]:
    """Return the numbers of classes that a model's outputs may have; of `logits` alone where it has them.

    Where the classes of a value of three dimensions are not known, they may be the last, as of tokens, or
    dimension 1, as of `nn.Conv1d`.
    """
    counts: set[int] = set()
    call = len(recording.modules[""].calls) - 1
    for leaf in _main_outputs(recording):
        shape, layouts = leaf.shape or (), recording.layouts
        layout = None if layouts is None else layouts.find("", call, leaf.port, leaf.picks)
        known = class_dim_of(layout, len(shape)) if layout is not None else None
        if known is not None:
            counts.add(shape[known])
        elif len(shape) > 1:
            counts.add(_class_size(shape))
            if len(shape) == 3 and leaf.picks != _LOGITS:
                counts.add(shape[1])
    return counts


def _main_outputs(recording: Recording) -> list[Leaf]:
    outputs = [leaf for leaf in recording.modules[""].calls[-1].outputs if leaf.shape is not None]
    return [leaf for leaf in outputs if leaf.picks == _LOGITS] or outputs


def _output_sizes(recording: Recording) -> tuple[int, ...]:
    """Return the sizes of the model's one output, without the batch."""
    outputs = _main_outputs(recording)
    if len(outputs) != 1:
        raise _invalid(
            f"the model returns {len(outputs)} tensors, so its head is ambiguous; {_ADVICE}, or add a head "
            "to a model of texts by `head.of`, `sentence` or `tokens`"
        )
    shape = outputs[0].shape or ()
    return shape[1:] or shape


def _width(layer: nn.Module) -> int:
    """Return the number of classes of a layer."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    return layer.out_channels if isinstance(layer, Convolution) else -1


def _class_size(shape: tuple[int, ...]) -> int:
    """Return the size of the dimension of classes, where that is not known: 1, of rank 3 the last."""
    return shape[-1] if len(shape) == 3 else shape[1]


def _last_layer(module: nn.Module) -> str:
    layers: list[str] = [path for path, part in module.named_modules() if _is_layer(part)]
    if not layers:
        raise _invalid(f"the model has no linear layer; {_ADVICE}")
    return layers[-1]


def _is_layer(part: nn.Module) -> bool:
    return isinstance(part, nn.Linear) or (
        isinstance(part, Convolution) and all(size == 1 for size in part.kernel_size)
    )


def _tied_to(module: nn.Module, path: str) -> str:
    """Return another name of one of the head's weights; empty if none are tied."""
    head = module.get_submodule(path)
    own, inside = {id(parameter) for parameter in head.parameters()}, {id(part) for part in head.modules()}
    for owner, part in module.named_modules():
        if id(part) in inside:
            continue
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in own:
                return f"{owner}.{name}".removeprefix(".")
    return ""


def _module_at(module: nn.Module, path: str) -> nn.Module:
    modules: dict[str, nn.Module] = dict(module.named_modules(remove_duplicate=False))
    if path not in modules:
        hints = nearest(path, [name for name in modules if name])
        rest = f"nearest: {', '.join(hints)}" if hints else "`trocar modules` lists them"
        raise _invalid(f"head.path: no module '{path}'; {rest}")
    return modules[path]


def _check_size(width: int, spec: HeadSpec, kernel_size: int = 1) -> None:
    """Refuse a head that is too large, before allocating it."""
    widths = (width, *spec.hidden, spec.classes)
    count = sum(before * after for before, after in pairwise(widths)) * kernel_size
    if count > MAX_PARAMETERS:
        raise _invalid(f"head: it would have about {count:,} parameters; the most is {MAX_PARAMETERS:,}")


def _made(
    module: nn.Module, old: nn.Module, spec: HeadSpec, seed: int, path: str, recording: Recording | None
) -> nn.Module:
    """Create the new head; the old one stays in place."""
    if isinstance(old, Convolution):
        _check_size(old.in_channels, spec, prod(old.kernel_size))
        return _initial(old, spec, seed, lambda place: _convolutions(old, spec, place))
    width = old.in_features if isinstance(old, nn.Linear) else _input_width(old, path, recording)
    has_weights = any(True for _ in old.parameters())
    return _new_layers(old if has_weights else module, width, spec, seed)


def _new_layers(like: nn.Module, width: int, spec: HeadSpec, seed: int) -> nn.Module:
    """Create the linear layers of a head, of the dtype and on the device of another module."""
    _check_size(width, spec)
    return _initial(like, spec, seed, lambda place: _linear_layers(width, spec, place))


def _initial(
    like: nn.Module,
    spec: HeadSpec,
    seed: int,
    layers: Callable[[Mapping[str, Any]], Iterator[nn.Module]],
) -> nn.Module:
    """Create layers with the initial weights of a seed."""
    weight = next((weight for weight in like.parameters() if weight.is_floating_point()), None)
    device = weight.device if weight is not None else None
    is_meta = device is not None and device.type == "meta"
    place = {"device": "meta" if is_meta else "cpu", "dtype": None if weight is None else weight.dtype}
    generator = torch.default_generator
    with torch.random.fork_rng(devices=[]):
        generator.manual_seed(seed)  # `torch.manual_seed` would also seed the devices' generators
        head = _sequence(layers(place), spec)
        if spec.init != "default":
            for layer in head.modules():
                _initialise(layer, spec.init)
    return head.to(device) if device is not None else head


def _linear_layers(width: int, spec: HeadSpec, place: Mapping[str, Any]) -> Iterator[nn.Module]:
    for size in (*spec.hidden, spec.classes):
        yield nn.Linear(width, size, bias=spec.bias, **place)
        width = size


def _convolutions(old: Convolution, spec: HeadSpec, place: Mapping[str, Any]) -> Iterator[nn.Module]:
    """Yield 1x1 convolutions for the hidden layers, then one with the old one's kernel."""
    kind: Callable[..., nn.Module] = next(
        kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(old, kind)
    )
    if old.groups > 1:
        raise _invalid(f"a convolution with {old.groups} groups cannot be a head; choose another `head.path`")
    width = old.in_channels
    for size in spec.hidden:
        yield kind(width, size, 1, bias=spec.bias, **place)
        width = size
    geometry = {
        name: getattr(old, name) for name in ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    }
    yield kind(width, spec.classes, bias=spec.bias, **geometry, **place)


def _sequence(layers: Iterator[nn.Module], spec: HeadSpec) -> nn.Module:
    """Put a ReLU behind each layer but the last, and dropout before each."""
    parts: list[nn.Module] = []
    for layer in layers:
        parts += [nn.ReLU()] if parts else []
        parts += [nn.Dropout(spec.dropout)] if spec.dropout else []
        parts.append(layer)
    return parts[0] if len(parts) == 1 else nn.Sequential(*parts)


def _initialise(layer: nn.Module, init: str) -> None:
    if not isinstance(layer, nn.Linear | Convolution):
        return
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    if init == "zeros":
        nn.init.zeros_(layer.weight)
    elif init == "normal":
        nn.init.normal_(layer.weight, std=0.01)
    elif init == "xavier":
        nn.init.xavier_uniform_(layer.weight)
    else:
        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")


def _input_width(old: nn.Module, path: str, recording: Recording | None) -> int:
    """Return the input width of a container, from a recorded pass."""
    record: ModuleRecord | None = None if recording is None else recording.modules.get(path)
    shapes = [leaf.shape for call in record.calls for leaf in call.inputs if leaf.shape] if record else []
    if len(shapes) != 1 or len(shapes[0]) != 2:
        layers = [
            f"{path}.{name}"
            for name, part in old.named_modules()
            if isinstance(part, nn.Linear | Convolution)
        ]
        rest = f"choose one of its layers, {', '.join(layers[-3:])}" if layers else "choose a linear layer"
        raise _invalid(
            f"head.path: '{path}' ({type(old).__name__}) does not take one vector per sample; {rest}"
        )
    return shapes[0][1]


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
