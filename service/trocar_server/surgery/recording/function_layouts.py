"""Function layouts: the dimensions of what each function of torch takes and returns in a pass with tags.

Keys are as those of modules, with `fn:` before the function's name, as in selectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from trocar_server.surgery.axes.axis import Dims
from trocar_server.surgery.axes.combining import combined
from trocar_server.surgery.axes.layout import Key
from trocar_server.surgery.axes.operation import dims_of
from trocar_server.surgery.ports import UNNAMED, CallPorts
from trocar_server.surgery.structure import leaves

ATTENTION = "scaled_dot_product_attention"
"""The function whose pattern and logits are values, too, though torch never computes them."""

_PATTERNS = ("scores", "logits")
FUNCTION = "fn:"
"""Begins the path of a function in a key."""


class FunctionDims:
    """Listens to the calls of a `FunctionWatch`, and notes the dimensions of their values.

    Attributes:
        dims: By key.
    """

    def __init__(self) -> None:
        self.dims: dict[Key, Dims] = {}

    def enter(self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of a call."""
        for port, value in CallPorts(UNNAMED, args, kwargs).items():
            self._note(name, index, port, value)

    def leave(
        self, name: str, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Note the result of a call."""
        self._note(name, index, "out", result)
        if name == ATTENTION:
            query, key = _operands(args, kwargs)
            for port in _PATTERNS:
                self.dims[FUNCTION + name, index, port, ()] = _pattern(query, key)

    def fail(self, name: str, index: int) -> None:
        """Ignore a call that raised."""

    def _note(self, name: str, index: int, port: str, value: Any) -> None:
        for picks, leaf in leaves(value, with_empty=port == "out"):
            if isinstance(leaf, Tensor) and not leaf.is_nested:
                self.dims[FUNCTION + name, index, port, picks] = dims_of(leaf)


def _operands(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Return query and key."""
    given = dict(zip(("query", "key"), args, strict=False)) | dict(kwargs)
    return iter((given["query"], given["key"]))


def _pattern(query: Tensor, key: Tensor) -> Dims:
    """Return the dimensions of the scores (..., queries, keys); grouped heads are the query's."""
    rows, keys = dims_of(query), dims_of(key)
    pairs = zip(rows[:-2], keys[:-2], query.shape[:-2], key.shape[:-2], strict=True)
    first = tuple(combined([row, dim] if size == other else [row], size) for row, dim, size, other in pairs)
    return (*first, rows[-2], keys[-2])
