"""Call: one operator of a traced pass, with where the rows are in its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import Node

from trocar_server.surgery.axes.operation import arguments_of, name_of
from trocar_server.surgery.rows.place import MixedRowsError, Rows, Size, sizes_of

Places: TypeAlias = Rows | Sequence[Rows | None] | None
"""Where the rows are in a result, or in each of a list of results; None in a constant."""


class Call:
    """One operator of a traced pass.

    Args:
        node: Its node in the graph.
        places: Where the rows are in the results of earlier nodes.
        symbol: The symbol of the number of rows.

    Attributes:
        name: Its name, without overload.
        tensors: The tensors among its arguments, those in lists included.
    """

    def __init__(self, node: Node, places: Mapping[Node, Places], symbol: Any) -> None:
        assert isinstance(node.target, torch._ops.OpOverload)
        self.node, self.func = node, node.target
        self.name = name_of(node.target)
        self._places, self._symbol = places, symbol
        values = list(_flat([*node.args, *node.kwargs.values()]))
        self.tensors = [value for value in values if _is_tensor(value)]
        self.has_row_counts = any(isinstance(value, Node) and not _is_tensor(value) for value in values)

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operator's schema; its default where it was left out."""
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        places, defaults = arguments_of(self.func)
        place = places.get(name)
        if place is None:
            return default
        return self.node.args[place] if place < len(self.node.args) else defaults.get(name, default)

    def given(self, name: str) -> bool:
        """Whether an argument is a tensor."""
        return _is_tensor(self.argument(name))

    def rows(self, tensor: Any) -> Rows | None:
        """Return where the rows are in a tensor; None in a constant, and in what is no tensor.

        Raises:
            MixedRowsError: Its elements are the numbers of rows.
        """
        rows = self.rows_or_numbers(tensor)
        if rows is not None and rows.is_number:
            raise MixedRowsError("it computes with the numbers of rows")
        return rows

    def rows_or_numbers(self, tensor: Any) -> Rows | None:
        """Return where the rows are in a tensor, which may consist of their numbers."""
        place = self.places(tensor)
        if isinstance(place, Sequence):
            raise MixedRowsError("it takes a list of results")
        return place

    def places(self, value: Any) -> Places:
        """Return where the rows are in a tensor or a list of results."""
        return self._places.get(value) if isinstance(value, Node) else None

    def rows_of(self, name: str) -> Rows | None:
        """Return where the rows are in an argument."""
        return self.rows(self.argument(name))

    def sizes(self, tensor: Any) -> list[Size]:
        """Return the sizes of a tensor."""
        return sizes_of(tensor.meta["val"], self._symbol)

    def rank(self, tensor: Any) -> int:
        """Return the number of dimensions of a tensor."""
        return int(tensor.meta["val"].dim())

    @property
    def output_sizes(self) -> list[Size]:
        """The sizes of its only result."""
        return sizes_of(self.node.meta["val"], self._symbol)

    @property
    def output_rank(self) -> int:
        """The number of dimensions of its first result."""
        value = self.node.meta["val"]
        return int((value if isinstance(value, Tensor) else value[0]).dim())

    @property
    def output_count(self) -> int:
        """The number of its results."""
        value = self.node.meta["val"]
        return 1 if isinstance(value, Tensor) else len(value)

    def dims(self, tensor: Any, name: str = "dim") -> list[int]:
        """Return dimensions of a tensor that are an argument, from 0; all of them where it is left out."""
        rank, given = self.rank(tensor), self.argument(name)
        if given is None or given == []:
            return list(range(rank))
        return [dim % max(rank, 1) for dim in ([given] if isinstance(given, int) else given)]

    def dim(self, tensor: Any, name: str = "dim", default: int = 0) -> int:
        """Return a dimension of a tensor that is an argument, from 0."""
        return int(self.argument(name, default)) % max(self.rank(tensor), 1)

    def check_constant(self, *names: str) -> None:
        """Raise `MixedRowsError` if one of these arguments depends on the rows."""
        for name in names:
            if self.rows_of(name) is not None:
                raise MixedRowsError(f"its {name} depends on the rows")


def met(places: Iterable[Rows | None]) -> Rows | None:
    """Return where the rows are that meet in a result; None of constants.

    Raises:
        MixedRowsError: They are at several places: an element would depend on several rows.
    """
    known = {rows for rows in places if rows is not None}
    if len(known) > 1:
        raise MixedRowsError("different rows meet")
    return next(iter(known), None)


def apart(rows: Rows | None, dims: Iterable[int]) -> Rows | None:
    """Return where rows are that an operation along other dimensions leaves there.

    Raises:
        MixedRowsError: It goes along the rows.
    """
    if rows is not None and rows.dim in dims:
        raise MixedRowsError("it goes along the rows")
    return rows


def moved(rows: Rows | None, steps: int) -> Rows | None:
    """Return where rows are after dimensions before them came or went."""
    return rows if rows is None else replace(rows, dim=rows.dim + steps)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Node) and isinstance(value.meta.get("val"), Tensor)
