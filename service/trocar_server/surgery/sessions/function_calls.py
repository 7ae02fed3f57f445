"""Function-call interception: torch functions that a model calls, by name.

    with FunctionWatch(listener):
        model(batch)

torch hands every call of a function or Tensor method to a `TorchFunctionMode`, and switches the mode
off while the call runs, so calls inside a function are not seen.
See Note: [Decomposed functions].
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import FunctionType
from typing import Any, Protocol

import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from trocar_server.surgery.ports import Arguments


class CallListener(Protocol):
    """Callbacks for every call. Torch functions that the listener itself calls are not reported."""

    def enter(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Arguments | None:
        """Called when a call starts; a result other than None replaces its arguments.

        `index` counts the calls of this name from 0.
        """

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> Any:
        """Called when a call has returned; a result other than None replaces its result."""

    def fail(self, name: str, index: int) -> None:
        """Called when a call has raised."""


class FunctionWatch(TorchFunctionMode):
    """Reports every torch function called inside its context to a listener.

    Calls are counted by name as they start, as calls of modules are. Attributes (`shape`, `T`,
    `data`) are not calls. Calls inside TorchScript are not seen.

    Args:
        listener: Receives the calls.
        is_paused: Whether present calls are not the model's.

    Attributes:
        counts: Calls by name.
    """

    def __init__(self, listener: CallListener, is_paused: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self._listener = listener
        self._is_paused = is_paused
        self.counts: Counter[str] = Counter()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one call, and report it."""
        kwargs = kwargs or {}
        name = function_name(func.__name__)
        if not name or self._is_paused():
            return func(*args, **kwargs)
        index = self.counts[name]
        self.counts[name] += 1
        args, kwargs = self._listener.enter(name, index, args, kwargs) or (args, kwargs)
        try:
            result = self._call(func, args, kwargs)
        except BaseException:
            self._listener.fail(name, index)
            raise
        other = self._listener.leave(name, index, args, kwargs, result)
        return result if other is None else other

    def _call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        opened = _OPENED.get(func)
        if opened is None:
            return func(*args, **kwargs)
        with self:
            return opened(*args, **kwargs)


_ATTRIBUTES = frozenset(("__get__", "__set__", "__delete__"))
_OPERATORS = {
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}
_ARITHMETIC = ("add", "sub", "mul", "div", *_OPERATORS, "matmul", "pow")


@lru_cache(maxsize=4096)
def function_name(name: str) -> str:
    """Return the selector name of a function, from its `__name__`; empty for attributes.

    Operators have the names of their functions: `1 - x` is `sub`, `x += 1` is `add_`, `x & y` is
    `bitwise_and`, `x[0]` is `getitem`. An overload has the name of its operator.
    """
    if name in _ATTRIBUTES:
        return ""
    if not (name.startswith("__") and name.endswith("__")):
        return name.partition(".")[0]
    plain = name.strip("_")
    for prefix, suffix in (("i", "_"), ("r", "")):
        if plain[:1] == prefix and plain[1:] in _ARITHMETIC:
            return _OPERATORS.get(plain[1:], plain[1:]) + suffix
    return _OPERATORS.get(plain, plain)


# Note: [Decomposed functions]
# `nn.MultiheadAttention` computes in one function of torch.nn.functional, so a mode would see one call
# and not the attention inside. That function is run as a copy of its Python code for which no tensor
# has overrides, with the mode on, so its inner calls are seen one by one. A function is opened when it
# is a layer of its own: written in Python, with projections inside. All others count once, also those
# that are written in Python around one operation (`softmax`, `relu`, `interpolate`) or are one formula
# (`local_response_norm`, `gumbel_softmax`).
# A mode also keeps modules from their fused kernels (`torch._transformer_encoder_layer_fwd`,
# `torch._native_multi_head_attention`): the same values, up to rounding, on the unfused path.
def _transparent(function: Any) -> Callable[..., Any]:
    blind = dict.fromkeys(
        ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"),
        lambda *_: False,
    )
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_OPENED: dict[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: _transparent(F.multi_head_attention_forward)
}
