"""What torch alone says a pass computes: a rebuilt model and hooks that clone at once. No code of ours."""

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torchvision.models import get_model_builder

Array = NDArray[Any]
Key = tuple[str, int, str]
"""Module path, call index, pick."""


def rebuilt_by_name(name: str) -> Any:
    """Build the torchvision model that a server hosts as `random:0`."""
    builder = get_model_builder(name)
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # GoogLeNet and Inception warn of their initialisation
        module = builder(**options)
    return module.eval()


def takes_list(name: str) -> bool:
    """Tell whether a torchvision model takes a list of images: detection."""
    return str(get_model_builder(name).__module__).startswith("torchvision.models.detection")


def hooked_outputs(
    model: nn.Module, inputs: Iterable[Array], paths: Iterable[str], *, as_list: bool = False
) -> dict[Key, torch.Tensor]:
    """Run the model and return every tensor that every call of these modules returned."""
    values: dict[Key, torch.Tensor] = {}
    calls: dict[str, int] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            index = calls[path] = calls.get(path, -1) + 1
            for pick, tensor in flat(output):
                values[path, index, pick] = tensor.clone()

        return keep

    tensors = [torch.from_numpy(array.copy()) for array in inputs]
    handles = [model.get_submodule(path).register_forward_hook(hook(path)) for path in set(paths)]
    with torch.inference_mode():
        model(*([list(tensors[0])] if as_list else tensors))
    for handle in handles:
        handle.remove()
    return values


def flat(value: Any, pick: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of what a torchvision module returns, with the picks as the wire writes them."""
    if isinstance(value, torch.Tensor):
        yield pick, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f'{pick}["{key}"]')
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from flat(item, f"{pick}[{index}]")
    elif type(value).__name__ == "ImageList":
        yield from flat({"tensors": value.tensors, "image_sizes": value.image_sizes}, pick)


def same_bits(found: Array, expected: torch.Tensor) -> bool:
    """Compare dtype, shape and every bit, NaN included."""
    array = expected.contiguous().numpy()
    return found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


def noise(*shape: int, seed: int = 0) -> Array:
    """Return float32 values in [0, 1), the same for the same seed."""
    return np.random.default_rng(seed).random(shape, dtype=np.float32)
