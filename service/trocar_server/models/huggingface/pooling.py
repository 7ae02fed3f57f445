"""Sentence embeddings: the pooling, dense layers and normalisation of a sentence-transformers folder.

    add_pooling(module, folder)                      # the model's output gains `sentence_embedding`

The transformer stays the root, so that module paths are those of transformers; `pooling`, `dense` and
`normalize` are modules beside its own. The arithmetic is that of sentence-transformers 5.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trocar_server.models.huggingface.folder import ModelFolder, read_configuration
from trocar_server.models.source import invalid

OUTPUT = "sentence_embedding"
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "GELU": nn.GELU, "ReLU": nn.ReLU, "SiLU": nn.SiLU}


class Pooling(nn.Module):
    """Token values (batch, tokens, width) to one vector for each sample, (batch, modes * width)."""

    def __init__(self, modes: tuple[str, ...]) -> None:
        super().__init__()
        self.modes = modes

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        """Pool the tokens where the mask is 1."""
        return torch.cat([_pooled(mode, values, mask) for mode in self.modes], dim=-1)

    def extra_repr(self) -> str:
        """Name the modes."""
        return ", ".join(self.modes)


class Dense(nn.Module):
    """A linear layer with its activation, and what is added to it, if anything."""

    def __init__(self, linear: nn.Linear, activation: nn.Module, residual: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = linear
        self.activation = activation
        self.residual = residual

    def forward(self, value: Tensor) -> Tensor:
        """Apply all of them."""
        result: Tensor = self.activation(self.linear(value))
        return result if self.residual is None else result + self.residual(value)


class Normalize(nn.Module):
    """Division by the 2-norm of each vector."""

    def forward(self, value: Tensor) -> Tensor:
        """Normalise along the last dimension."""
        return torch.nn.functional.normalize(value, p=2, dim=1)


def _forward_with_embedding(own: type[nn.Module]) -> Callable[..., dict[str, Any]]:
    """The forward of a model that returns its sentence embedding beside its own outputs."""
    names = [*inspect.signature(own.forward).parameters][1:]  # without `self`
    place = names.index("attention_mask") if "attention_mask" in names else len(names)

    @functools.wraps(own.forward)  # its signature says what the model takes
    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        outputs: Mapping[str, Any] = own.forward(self, *args, **kwargs)
        mask = args[place] if len(args) > place else kwargs.get("attention_mask")
        values = outputs["last_hidden_state"]
        if mask is None:
            mask = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
        value = self.pooling(values, mask)
        for name in self.sentence_steps:
            value = getattr(self, name)(value)
        return {**outputs, OUTPUT: value}

    return forward


def add_pooling(module: nn.Module, folder: ModelFolder, weights: bool) -> None:
    """Add what follows the transformer in a sentence-transformers folder, if anything.

    Args:
        module: The transformer, changed in place: its class gains a forward around its own.
        folder: The folder.
        weights: Whether dense layers get their weights; else they keep their initial values.

    Raises:
        ServiceError: `MODEL_INVALID`, a module of a type that is not known here.
    """
    if not folder.modules:
        return
    root = folder.root
    steps: list[str] = []
    for entry in folder.modules[1:]:
        kind = str(entry.get("type", "")).rpartition(".")[2]
        path = (root / str(entry.get("path", ""))).resolve()
        if not path.is_relative_to(root.resolve()):
            raise invalid(f"'{root.name}': modules.json names a path outside of the folder")
        if kind == "Pooling":
            module.pooling = Pooling(_modes(read_configuration(path / "config.json")))
        elif kind == "Normalize":
            if (path / "config.json").is_file():  # since sentence-transformers 6
                _check_values(path, read_configuration(path / "config.json"))
            _add(module, "normalize", Normalize(), steps)
        elif kind == "Dense":
            dense = _dense(path, weights).to(getattr(module, "dtype", None))
            _add(module, "dense", dense, steps)
        else:
            raise invalid(
                f"'{root.name}': its module {kind[:60]!r} is not supported; supported are Pooling, "
                "Dense, Normalize"
            )
    if not isinstance(getattr(module, "pooling", None), Pooling):
        raise invalid(f"'{root.name}': modules.json names no Pooling")
    module.sentence_steps = tuple(steps)  # type: ignore[assignment]  # a plain attribute
    own = type(module)
    # The forward is a class's of this module: a signature is read from transformers' own.
    pooled = type("_WithPooling", (), {"__module__": __name__, "forward": _forward_with_embedding(own)})
    module.__class__ = type(own.__name__, (pooled, own), {"__module__": own.__module__})


def _add(module: nn.Module, name: str, part: nn.Module, steps: list[str]) -> None:
    name = name if name not in steps else f"{name}_{len(steps)}"
    module.add_module(name, part)
    steps.append(name)


def _modes(config: dict[str, Any]) -> tuple[str, ...]:
    given = config.get("pooling_mode")
    if given is None:
        given = [mode for key, mode in _MODES.items() if config.get(key)] or ["mean"]
    modes = (given,) if isinstance(given, str) else tuple(given)
    if wrong := [mode for mode in modes if mode not in _MODES.values()]:
        raise invalid(f"the pooling mode {wrong[0]!r} is not known; {', '.join(_MODES.values())} are")
    return modes


def _check_values(path: Path, config: dict[str, Any]) -> None:
    """Refuse a part that reads or writes other values than the sentence's vector."""
    for key in ("module_input_name", "module_output_name"):
        name = config.get(key) or OUTPUT
        if name != OUTPUT:
            raise invalid(f"the part '{path.name}' is for {str(name)[:60]!r}; only {OUTPUT!r} is supported")


def _dense(path: Path, weights: bool) -> Dense:
    config = read_configuration(path / "config.json")
    _check_values(path, config)
    name = str(config.get("activation_function", "")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise invalid(f"the activation {name[:60]!r} of a dense layer is not known")
    width, new_width = config["in_features"], config["out_features"]
    residual: nn.Module | None = None
    if config.get("use_residual"):
        residual = nn.Identity() if width == new_width else nn.Linear(width, new_width, bias=False)
    linear = nn.Linear(width, new_width, bias=config.get("bias", True))
    dense = Dense(linear, _ACTIVATIONS[name](), residual)
    if weights:
        _load(dense, path)
    return dense


def _load(dense: Dense, path: Path) -> None:
    file = path / "model.safetensors"
    if not file.is_file():
        raise invalid(
            f"the dense layer '{path.name}' has no model.safetensors: run `trocar admin convert "
            "pytorch_model.bin model.safetensors` in its folder first"
        )
    state = {key if "." in key else f"linear.{key}": value for key, value in load_file(file).items()}
    try:
        dense.load_state_dict(state)
    except RuntimeError as error:
        problem = " ".join(str(error).split())[:300]
        raise invalid(f"the weights of the dense layer '{path.name}' do not fit it: {problem}") from None


def _pooled(mode: str, values: Tensor, mask: Tensor) -> Tensor:
    accumulated = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    if mode == "cls":
        return _at(values, mask.to(torch.int).argmax(dim=1))
    if mode == "lasttoken":
        outcome, index = mask.flip(1).max(1)
        index = torch.where(outcome == 0, values.shape[1] - 1, index)
        return _at(values * mask.unsqueeze(-1).to(values.dtype), values.shape[1] - index - 1)
    if mode == "max":
        return values.masked_fill(mask.unsqueeze(-1) == 0, float("-inf")).max(dim=1).values
    if mode == "weightedmean":
        weights = torch.arange(1, values.shape[1] + 1, device=values.device, dtype=accumulated).view(1, -1, 1)
        weights = weights - mask.to(torch.int32).argmax(dim=1).view(-1, 1, 1)
        weights = mask.unsqueeze(-1).to(accumulated) * weights
        total = (values * weights).sum(dim=1)
        return (total / torch.clamp(weights.sum(dim=1), min=1e-9)).to(values.dtype)
    factors = mask.unsqueeze(-1).to(values.dtype)
    total = (values * factors).sum(dim=1, dtype=accumulated)
    count = torch.clamp(factors.sum(dim=1, dtype=accumulated), min=1e-9)
    return (total / (count if mode == "mean" else torch.sqrt(count))).to(values.dtype)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """Take one token of each sample."""
    chosen = index.view(-1, 1, 1).expand(-1, 1, values.shape[-1])
    return torch.gather(values, 1, chosen).squeeze(1)
