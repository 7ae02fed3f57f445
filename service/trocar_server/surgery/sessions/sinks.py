"""Attention sinks: columns of a softmax that stand for no key, and that the model drops after it.

    combined = torch.cat([logits, sink], -1)       # or torch.nn.functional.pad(logits, (0, 1))
    pattern = combined.softmax(-1)[..., :-1]       # rows sum to 1 minus the share of the sink

They are known by what the model does, not by names: a slice of the softmax's result drops them.
"""

from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from trocar_server.surgery.ports import UNNAMED, CallPorts, Place
from trocar_server.surgery.recording.recording import FunctionInput, ModuleCall, Sink
from trocar_server.surgery.sessions.attention import SOFTMAX
from trocar_server.surgery.structure import leaves

T = TypeVar("T")

_JOINS = frozenset({"cat", "concat", "concatenate"})
_CASTS = frozenset({"to", "type", "float", "double", "half", "bfloat16", "contiguous", "clone"})


class SinkWatch:
    """Finds the sinks in the function calls of a recorded pass, and notes each at the call of its softmax."""

    def __init__(self) -> None:
        self._joined = _OfTensors[dict[bool, tuple[int, FunctionInput]]]()
        self._shares = _OfTensors[tuple[ModuleCall, dict[bool, tuple[int, FunctionInput]]]]()

    def see(self, name: str, call: ModuleCall, ports: CallPorts, result: Any, index: int) -> None:
        """Note a call that has returned.

        Args:
            name: The function.
            call: Its record.
            ports: Its inputs.
            result: What it returned.
            index: The index of the call.
        """
        given = next((leaf for _, leaf in leaves(ports) if isinstance(leaf, torch.Tensor)), None)
        if not isinstance(result, torch.Tensor) or given is None:
            return
        if name in _JOINS or name == "pad":
            self._joined.set(result, _widened(name, index, ports, result))
        elif name == SOFTMAX:
            call.is_along_last = _second(ports, "dim") in (-1, given.dim() - 1)
            self._shares.set(result, (call, self._joined.get(given) or {}))
        elif name == "getitem":
            self._drop(given, _second(ports), result)
        elif name in _CASTS or name == "dropout" or (name == "sub" and _is_by_row(_second(ports))):
            self._joined.copy(given, result)
            self._shares.copy(given, result)

    def _drop(self, shares: torch.Tensor, index: Any, result: torch.Tensor) -> None:
        """Mark the softmax of these shares, if an index drops columns of them."""
        marked, dropped = self._shares.get(shares), _dropped(index, shares)
        if marked is None or dropped is None or result.dim() != shares.dim():
            return
        call, joined = marked
        is_first, count = dropped
        width, logits = joined.get(is_first, (0, None))
        call.sink = Sink(count, is_first, logits if width == count else None)


class _OfTensors(Generic[T]):
    """What is known of tensors, for as long as they live."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[torch.Tensor], T]] = {}

    def set(self, tensor: torch.Tensor, known: T) -> None:
        self._known[id(tensor)] = ref(tensor), known

    def get(self, tensor: torch.Tensor) -> T | None:
        own, known = self._known.get(id(tensor), (None, None))
        return known if own is not None and own() is tensor else None

    def copy(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        known = self.get(tensor)
        if known is not None:
            self.set(other, known)


def _widened(
    name: str, index: int, ports: CallPorts, result: torch.Tensor
) -> dict[bool, tuple[int, FunctionInput]]:
    """Return the input that a call adds columns to, by whether these come first, with their number."""
    if name == "pad":
        sizes = list(_second(ports, "pad") or ())
        is_wider = len(sizes) >= 2 and not any(sizes[2:]) and sorted(sizes[:2])[0] == 0
        return {bool(sizes[0]): (sum(sizes[:2]), (name, index, "in", (0,)))} if is_wider else {}
    given = ports.get("in(tensors)", ports.get("in", {}).get(0))
    dim = _second(ports, "dim", "axis")
    if dim not in (-1, result.dim() - 1) or not isinstance(given, list | tuple) or len(given) != 2:
        return {}
    widths = [tensor.shape[-1] for tensor in given]
    return {
        is_first: (width, (name, index, *_place(ports, int(is_first))))
        for is_first, width in ((True, widths[0]), (False, widths[1]))
        if isinstance(width, int)
    }


def _place(ports: CallPorts, position: int) -> Place:
    """Return where a tensor of the list is that a call joins."""
    return ("in(tensors)", (position,)) if "in(tensors)" in ports else ("in", (0, position))


def _second(ports: CallPorts, *names: str) -> Any:
    """Return the second argument of a call, which may be passed by one of these names."""
    keywords = [port for port, _ in map(UNNAMED.place_of, names) if port in ports]
    return ports[keywords[0]] if keywords else ports.get("in", {}).get(1)


def _dropped(index: Any, value: torch.Tensor) -> tuple[bool, int] | None:
    """Return which columns an index drops, whether the first ones and how many; None for any other index."""
    parts = index if isinstance(index, tuple) else (index,)
    last = parts[-1] if parts else None
    is_last = parts[:1] == (...,) or len(parts) == value.dim()
    others = [part for part in parts[:-1] if part is not ... and part != slice(None)]
    if not isinstance(last, slice) or last.step not in (None, 1) or not is_last or others:
        return None
    start, stop = last.start or 0, last.stop
    before = _constant(start)
    after = 0 if stop is None else _constant(-stop if _is_negative(stop) else value.shape[-1] - stop)
    if before is None or after is None or (before > 0) == (after > 0) or min(before, after) < 0:
        return None
    return before > 0, before or after


def _is_negative(number: Any) -> bool:
    constant = _constant(number)
    return constant is not None and constant < 0


def _constant(number: Any) -> int | None:
    """Return a number, or None for one that depends on the sizes of the inputs."""
    if isinstance(number, torch.SymInt):
        expression: Any = number.node.expr
        return int(expression) if expression.is_Integer else None
    return number if isinstance(number, int) else None


def _is_by_row(value: Any) -> bool:
    """Whether a value is one number for each row, which the softmax does not see."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and _constant(value.shape[-1]) == 1
