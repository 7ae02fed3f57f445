"""Joining: the values of several passes of one text as if one pass had had their tokens."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from trocar_server.engine.generate.decoding import DecodedPass
from trocar_server.engine.request.plan import Payload
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.surgery.axes.layout import tokens_dim_of


@dataclass(frozen=True)
class Joined:
    """What is told of some passes at once.

    Attributes:
        first_position: The position of the first token of the first pass.
        token_count: The tokens that were chosen: one by each pass.
        feature_maps: Their values, joined along the dimension of the tokens.
        positions: Of the rows of each value, by its name.
    """

    first_position: int
    token_count: int
    feature_maps: tuple[FeatureMap, ...]
    positions: Mapping[str, Sequence[int]]


def joined(passes: Sequence[DecodedPass]) -> Iterator[Joined]:
    """Yield passes joined; each alone where what was asked for is not plain values, and that of a prompt."""
    if len(passes) > 1 and passes[0].token_count > 1:  # its values may be large
        yield from joined(passes[:1])
        yield from joined(passes[1:])
        return
    maps = [each for decoded in passes for each in decoded.feature_maps]
    if len(passes) > 1 and not all(each.output.source.tap.is_plain for each in maps):
        for decoded in passes:
            yield from joined([decoded])
        return
    by_name: dict[str, list[FeatureMap]] = {}
    for each in maps:
        by_name.setdefault(each.output.name, []).append(each)
    positions = {
        name: [*chain.from_iterable(each.positions.get(name, ()) for each in passes)] for name in by_name
    }
    values = tuple(_joined(parts) if len(parts) > 1 else parts[0] for parts in by_name.values())
    known = {name: rows for name, rows in positions.items() if rows}
    yield Joined(passes[0].first_position, len(passes), values, known)


def _joined(parts: Sequence[FeatureMap]) -> FeatureMap:
    first = parts[0].output
    dim = tokens_dim_of(first.source.target.layout)
    assert dim is not None  # refused before
    shape = list(first.shape)
    shape[dim] = sum(each.output.shape[dim] for each in parts)
    outer = math.prod(shape[:dim])
    values: list[Payload] = []
    for each in parts:
        assert each.values is not None  # those of a plain tap
        values.append(each.values.reshape(outer, -1))
    whole = np.concatenate(values, axis=1).reshape(-1)
    return replace(parts[0], output=replace(first, shape=tuple(shape)), values=whole)
