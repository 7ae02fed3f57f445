"""TorchScript: a part made by `torch.jit.script` or `trace` runs as one module, with frozen weights.

    with_scripted_parts(model)          # model.tower is a `Scripted` around a copy of it

Hooks are called around such a part, never inside, and its weights are in C++, where replicas cannot share
them. So it is hidden from the module tree: all copies of the tree run the same one, and a buffer says which.
"""

import hashlib
import io
import warnings
from typing import Any, Self

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError


class Scripted(nn.Module):
    """A part in TorchScript, as one module.

    Args:
        part: The part; it is copied.
    """

    identity: Tensor
    """A digest of its code and weights, which makes the model that it is in another one."""

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        super().__init__()
        own = _copied(part, torch.device("cpu")).eval()
        self._hidden = _Hidden(own)
        self.register_buffer("identity", _identity(own))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part."""
        return self._hidden.on(self.identity.device)(*args, **kwargs)

    def extra_repr(self) -> str:
        """Return the name of the class that was compiled."""
        return f"TorchScript of {self._hidden.name}"


class _Hidden:
    """A part that is no submodule, and one for all copies of a tree; on each device one."""

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        self.name = str(part.original_name)
        self._part = part
        self._moved: dict[torch.device, torch.jit.ScriptModule] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def on(self, device: torch.device) -> torch.jit.ScriptModule:
        """Return the part on a device."""
        if device not in self._moved:
            self._moved[device] = _copied(self._part, device)
        return self._moved[device]


def with_scripted_parts(module: nn.Module, model_id: str) -> nn.Module:
    """Put parts in TorchScript behind modules that can be hooked; return the model.

    Raises:
        ServiceError: `MODEL_INVALID`, the whole model is one.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ServiceError(
            ErrorReason.MODEL_INVALID,
            f"model '{model_id}' is TorchScript (torch.jit.script or trace), of which nothing but input and "
            "output can be seen: host the nn.Module that it was made of; to host it all the same, put it "
            "into an nn.Module, such as torch.nn.Sequential(scripted)",
        )
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        for name, child in part.named_children():
            if isinstance(child, torch.jit.ScriptModule):
                setattr(part, name, Scripted(child))
    return module


def _copied(part: torch.jit.ScriptModule, device: torch.device) -> torch.jit.ScriptModule:
    """Copy a part to a device, also to that of tensors without data, where `to` fails (torch 2.14)."""
    buffer = io.BytesIO()
    with torch.inference_mode(mode=False), warnings.catch_warnings():  # for gradients through it
        warnings.simplefilter("ignore")  # torch 2.14: TorchScript is deprecated
        torch.jit.save(part, buffer)
        buffer.seek(0)
        made: torch.jit.ScriptModule = torch.jit.load(buffer, map_location=device)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    return made


def _identity(part: torch.jit.ScriptModule) -> Tensor:
    digest = hashlib.sha256()
    for name, one in part.named_modules():
        digest.update(f"{name}\n{getattr(one, 'code', '')}\n".encode())
    for name, tensor in part.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
