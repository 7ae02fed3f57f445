"""Text head: a new classifier behind a model of texts that has none, of whole texts or of tokens.

    path = add_text_head(model, "sentence", make)       # the model's output gains `logits`

The model stays the root, so that module paths are those of transformers; the head is `head`, beside its own
modules, and `head_pooling` makes a vector of a text where the model has none. Class and forward are the
model's, with the head behind them.

# Note: [The vector of a text]
The first of these that the model has: `sentence_embedding` of a sentence-transformers folder, the model's own
`pooler_output`, the mean over the tokens without padding.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.pooling import OUTPUT, Dense, Pooling

HEAD, POOLING = "head", "head_pooling"
Of = Literal["sentence", "tokens"]


def add_text_head(module: nn.Module, of: Of, make: Callable[[int], nn.Module]) -> str:
    """Put a head behind a model, in place, and return its path.

    Args:
        module: The model: its output has `last_hidden_state` (batch, tokens, width).
        of: `sentence`: logits (batch, classes), see Note: [The vector of a text]; `tokens`: logits (batch,
            tokens, classes).
        make: Makes the head, given the width of its input.

    Raises:
        ServiceError: `TRAINER_INVALID`, the model has a module of that name, or is no model of texts.
    """
    if hasattr(module, HEAD) or hasattr(module, POOLING):
        raise _invalid(f"the model has a module '{HEAD}' already; replace it by `head.path`")
    width = _width(module, of)
    module.add_module(HEAD, make(width))
    if of == "sentence":
        module.add_module(POOLING, Pooling(("mean",)))
    own = type(module)
    # The forward is a class's of this module: a signature is read from transformers' own.
    headed = type("_WithHead", (), {"__module__": __name__, "forward": _forward_with_head(own, of)})
    module.__class__ = type(own.__name__, (headed, own), {"__module__": own.__module__})
    return HEAD


def _forward_with_head(own: type[nn.Module], of: Of) -> Callable[..., dict[str, Any]]:
    signature = inspect.signature(own.forward)

    @functools.wraps(own.forward)  # its signature says what the model takes
    def forward(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        outputs: Mapping[str, Any] = own.forward(self, *args, **kwargs)
        value = outputs["last_hidden_state"]
        if of == "sentence":
            given = signature.bind_partial(self, *args, **kwargs).arguments
            value = _vector(self, outputs, given.get("attention_mask"))
        return {**outputs, "logits": self.head(value)}

    return forward


def _vector(module: Any, outputs: Mapping[str, Any], mask: Tensor | None) -> Tensor:
    """Return the vector of each text; see Note: [The vector of a text]."""
    for name in (OUTPUT, "pooler_output"):
        output = outputs.get(name)
        if isinstance(output, Tensor):
            return output
    values = outputs["last_hidden_state"]
    if mask is None:
        mask = torch.ones(values.shape[:2], dtype=torch.int64, device=values.device)
    vector: Tensor = module.head_pooling(values, mask)
    return vector


def _width(module: nn.Module, of: Of) -> int:
    pooling = getattr(module, "pooling", None)
    steps = [getattr(module, name) for name in getattr(module, "sentence_steps", ())]
    dense = [step for step in steps if isinstance(step, Dense)]
    if of == "sentence" and dense:
        return dense[-1].linear.out_features
    width = getattr(getattr(module, "config", None), "hidden_size", None)
    if not isinstance(width, int):
        raise _invalid(f"the model has no hidden states of texts for a head of {of}; choose `head.path`")
    return width * len(pooling.modes) if of == "sentence" and isinstance(pooling, Pooling) else width


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, f"head.of: {message}")
