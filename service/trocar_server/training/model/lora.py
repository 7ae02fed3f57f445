"""LoRA adapters: PEFT's own layers in a trainer's module tree.

    paths = add_lora(tree, LoraSpec(ranks=({"selector": "*.q_proj", "rank": 16},)), seed=0)

# Note: [PEFT's layers]
The layers are made by `peft.inject_adapter_in_model` after `torch.manual_seed(seed)`, so initial values,
gradients and dropout are PEFT's. A module `q_proj` becomes PEFT's layer, with the old one at
`q_proj.base_layer` and the weights `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`.

# Note: [Stacked experts]
A mixture of experts keeps the weights of all experts in one parameter (experts, rows, columns) of a module
`experts`, which is no linear layer. PEFT adapts such a parameter (its `target_parameters`) with a layer
around the module, one more around that for the next parameter, and so on. Dropout is not possible there.
Such modules are known by their name or class; other parameters of three dimensions are embeddings.
"""

import json
import re
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.training.spec.trainer_spec import LoraRankSpec, LoraSpec

ADAPTER = "default"
"""PEFT's name of the adapter in a tree."""
DEFAULT_ALPHA = 8.0
"""PEFT's own default (0.21)."""
_ALL_LAYERS = "*"
"""The pattern of every layer, which leaves stacked experts out as PEFT's `all-linear` does."""
_STACKED_DIMS = 3
"""Of a parameter of stacked experts: (experts, rows, columns)."""
_INSIDE = re.compile(r"\.base_layer(?=\.|$)")
"""Where PEFT puts what it adapts, in a path of a tree with adapters."""
_PREFIX = "base_model.model."
"""PEFT's prefix of names in its files."""


def add_lora(module: nn.Module, spec: LoraSpec, seed: int, head: str = "") -> dict[str, LoraRankSpec]:
    """Put LoRA layers into a tree; return the entry of the spec by the path of each adapted place.

    See Note: [PEFT's layers] and Note: [Stacked experts]. Torch's global random state is unaffected.

    Args:
        module: The model, changed in place.
        spec: Ranks by pattern.
        seed: Seed of the initial weights.
        head: Path of a new head, which gets no adapter.

    Raises:
        ServiceError: `TRAINER_INVALID`, a pattern matches no layer that can be adapted, or PEFT refuses.
    """
    chosen = lora_modules(module, spec, head)
    peft = peft_library()
    config = lora_config(module, spec, chosen)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `fan_in_fan_out`, which PEFT sets per layer as it should be
            torch.default_generator.manual_seed(seed)
            peft.inject_adapter_in_model(config, module, ADAPTER)
            peft.tuners.tuners_utils.cast_adapter_dtype(module, ADAPTER)  # float32, as `get_peft_model` does
    except (ValueError, TypeError, RuntimeError, NotImplementedError) as error:
        raise _invalid(f"PEFT refuses it ({first_line(error)})") from error
    return chosen


def lora_modules(module: nn.Module, spec: LoraSpec, head: str = "") -> dict[str, LoraRankSpec]:
    """Return the entry of the spec for each place that gets an adapter: the first that matches it.

    Places are layers, and parameters of stacked experts.

    Raises:
        ServiceError: `TRAINER_INVALID`, a pattern matches no place that can be adapted.
    """
    if not spec.ranks:
        raise _invalid("give a rank for at least one pattern")
    places = dict.fromkeys(
        _INSIDE.sub("", path) for path in _places(module) if path and not re.search(r"\.lora_[AB]\.", path)
    )
    paths = [path for path in places if not (head and f"{path}.".startswith(f"{head}."))]
    chosen: dict[str, LoraRankSpec] = {}
    for index, entry in enumerate(spec.ranks):
        matched = [path for path in paths if is_match(path, entry.selector)]
        if entry.selector == _ALL_LAYERS:
            matched = [path for path in matched if not _is_parameter(module, path)]
        if not matched:
            hints = nearest(entry.selector, paths)
            rest = f"; nearest: {', '.join(hints)}" if hints else ""
            raise _invalid(
                f"'{entry.selector}' matches no linear layer, convolution or stacked experts{rest}",
                f"ranks[{index}].selector",
            )
        chosen |= {path: entry for path in matched if path not in chosen}
    return {path: chosen[path] for path in paths if path in chosen}


def is_match(path: str, pattern: str) -> bool:
    """Whether a pattern matches a module's path.

    `*` stands for any text, dots included; without one, the pattern is the path or its last components, as
    PEFT's `target_modules` are; after `^` it is the whole path.
    """
    if pattern.startswith("^"):
        return path == pattern[1:]
    if "*" in pattern:
        return fnmatchcase(path, re.sub(r"([\[?])", r"[\1]", pattern))
    return path == pattern or path.endswith(f".{pattern}")


def lora_config(module: nn.Module, spec: LoraSpec, chosen: Mapping[str, LoraRankSpec], head: str = "") -> Any:
    """Return PEFT's configuration: `peft.get_peft_model(model, config)` makes the same adapter.

    Args:
        module: The tree, for the kinds of its layers.
        spec: The adapter.
        chosen: Its entries by path.
        head: Path of a new head, which PEFT stores with the adapter.
    """
    parameters = [path for path in chosen if _is_parameter(module, path)]
    layers = [path for path in chosen if path not in parameters]
    if parameters and spec.dropout:
        raise _invalid(
            f"stacked experts take no dropout; leave '{parameters[0]}' out, or set it to 0", "dropout"
        )
    ranks = {path: entry.rank for path, entry in chosen.items()}
    alphas = {path: entry.alpha or spec.alpha for path, entry in chosen.items()}
    rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
    names = "|".join(map(re.escape, layers))
    return peft_library().LoraConfig(
        r=rank,
        lora_alpha=_whole(alpha),
        lora_dropout=spec.dropout,
        use_rslora=spec.use_rslora,
        target_modules=f"(?:{names})" if layers else [],
        target_parameters=parameters or None,
        rank_pattern={f"^{re.escape(path)}": own for path, own in ranks.items() if own != rank},
        alpha_pattern={f"^{re.escape(path)}": _whole(own) for path, own in alphas.items() if own != alpha},
        modules_to_save=[head] if head else None,
        fan_in_fan_out=any(_is_transposed(_base(module.get_submodule(path))) for path in layers),
    )


def adapter_config(module: nn.Module, spec: LoraSpec, base: str, head: str = "") -> str:
    """Return the text of `adapter_config.json` for a tree with adapters; `base` names the base model."""
    chosen = lora_modules(module, spec, head)
    config = lora_config(module, spec, chosen, head)
    config.inference_mode, config.base_model_name_or_path = True, base
    fields = {
        key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()
    }
    return json.dumps(fields, indent=2, sort_keys=True)


def lora_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the adapters' parameters, in the order of `named_parameters`."""
    return tuple(name for name, _ in module.named_parameters() if _is_lora(name))


def peft_name(name: str) -> str:
    """Return the name of an adapter's or a head's parameter in PEFT's files."""
    return _PREFIX + name.replace(f".{ADAPTER}.", ".") if _is_lora(name) else _PREFIX + name


def read_adapter(data: bytes, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return an adapter's tensors from a file of PEFT, by the tree's names.

    Args:
        data: The bytes of `adapter_model.safetensors`.
        own: The tree's tensors that the file has to fill.

    Raises:
        ServiceError: `TRAINER_INVALID`, it is no such file, or names or shapes differ.
    """
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise _invalid(f"it is not a safetensors file ({first_line(error)})", "file") from None
    wanted = {peft_name(name): name for name in own}
    if wanted.keys() != tensors.keys():
        name = sorted(wanted.keys() ^ tensors.keys())[0]
        raise _invalid(f"'{name}' is missing in either the file or the trainer", "file")
    for theirs, name in wanted.items():
        if tensors[theirs].shape != own[name].shape:
            shapes = f"{tuple(tensors[theirs].shape)}, not {tuple(own[name].shape)}"
            raise _invalid(f"'{theirs}' has shape {shapes}", "file")
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
        raise _invalid("it has numbers that are not finite", "file")
    return {name: tensors[theirs] for theirs, name in wanted.items()}


def _is_lora(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _is_adaptable(part: nn.Module) -> bool:
    if isinstance(part, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False  # attention reads its weights and never calls it
    return isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) or _is_transposed(part)


def _places(module: nn.Module) -> Iterator[str]:
    """Yield the paths of layers and stacked parameters that can be adapted, in a tree with adapters, too."""
    for path, part in module.named_modules():
        if _is_adaptable(part):
            yield path
        elif path.rpartition(".")[2] == "experts" or type(part).__name__.endswith("Experts"):
            own = part.named_parameters(recurse=False)
            yield from (f"{path}.{name}" for name, parameter in own if parameter.dim() == _STACKED_DIMS)


def _is_parameter(module: nn.Module, path: str) -> bool:
    """Whether a place is a parameter of stacked experts, and not a layer."""
    part: Any = module
    for name in path.split("."):
        part = getattr(_base(part), name, None) if isinstance(part, nn.Module) else None
    return isinstance(part, nn.Parameter)


def _is_transposed(part: nn.Module) -> bool:
    """Whether it is transformers' `Conv1D`, a transposed linear layer; by name, not to import it."""
    return type(part).__name__ == "Conv1D" and type(part).__module__ == "transformers.pytorch_utils"


def _base(part: nn.Module) -> nn.Module:
    while isinstance(inner := getattr(part, "base_layer", None), nn.Module):
        part = inner
    return part


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def peft_library() -> Any:
    """Return PEFT. Its import takes seconds, and brings transformers.

    Raises:
        ServiceError: `TRAINER_INVALID`, it is not installed.
    """
    try:
        import peft
    except ImportError:
        raise _invalid("the server has no PEFT; its operator has to install trocar[peft]") from None
    return peft


def _invalid(message: str, field: str = "") -> ServiceError:
    where = f"lora.{field}" if field else "lora"
    return ServiceError(ErrorReason.TRAINER_INVALID, f"{where}: {message}")
