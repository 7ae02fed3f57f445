"""Placing: the rows of a pass that a tap collects, and their positions."""

from typing import Any

import pytest
import torch

from trocar_server.engine.generate.placing import Placing, Span
from trocar_server.engine.request.plan import TapRequest
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.errors import ServiceError
from trocar_server.surgery import Leaf, Target, parse_selector
from trocar_server.surgery.axes.layout import Layout, Meaning, tokens_dim_of

PROMPT = Span(0, 6)
HIDDEN = ("batch", "tokens", "channels")


def target(*axes: str) -> TapTarget:
    """Return the tap of a value with these dimensions."""
    selector = parse_selector("head")
    layout = Layout(tuple(Meaning(name) for name in axes))
    value = Target("head", "head", 0, "out", layout=layout)
    return TapTarget(
        value, Leaf("out", (), "Tensor", (1, 6, 4), torch.float32), TapRequest(selector), "Linear"
    )


def placed(chosen: set[int] | None, value: torch.Tensor, span: Span, *axes: str) -> Any:
    """Return the rows that a tap at these positions collects, and their positions."""
    placing = Placing() if chosen is None else Placing({0: frozenset(chosen)})
    rows, positions = placing.collected(target(*axes), value, span)
    return rows, positions


def test_a_value_of_the_head_has_rows_from_the_last_token_of_the_prompt_on() -> None:
    value = torch.randn(1, 1, 4)
    rows, positions = placed(None, value, PROMPT, *HIDDEN)
    assert positions == (5,)
    assert torch.equal(rows, value)
    rows, positions = placed({5, 6}, value, Span(6, 1), *HIDDEN)
    assert positions == (6,)
    with pytest.raises(ServiceError, match="'head' has values from position 5 on"):
        placed({2}, value, PROMPT, *HIDDEN)


def test_rows_that_belong_to_no_token_are_refused() -> None:
    with pytest.raises(ServiceError, match="12 rows for 6 tokens"):
        placed(None, torch.randn(1, 12, 4), PROMPT, *HIDDEN)
    rows, positions = placed(None, torch.randn(1, 8, 4), Span(7, 1), *HIDDEN)  # keys of all positions
    assert (rows.shape, positions) == ((1, 1, 4), (7,))


@pytest.mark.parametrize("axes", [HIDDEN, ("batch", "heads", "tokens", "channels")])
@pytest.mark.parametrize("chosen", [None, {0}, {1, 4, 9}, {5}, set[int]()])
def test_rows_and_positions_agree(axes: tuple[str, ...], chosen: set[int] | None) -> None:
    dim = axes.index("tokens")
    shape = [2 if name == "heads" else 6 if name == "tokens" else 1 for name in axes]
    value = torch.arange(6).reshape([6 if name == "tokens" else 1 for name in axes]).expand(shape)
    rows, positions = placed(chosen, value, PROMPT, *axes)
    assert positions == tuple(row for row in range(6) if chosen is None or row in chosen)
    assert rows.movedim(dim, 0).flatten(1)[:, 0].tolist() == list(positions)


def test_only_one_dimension_is_that_of_the_tokens() -> None:
    assert tokens_dim_of(target(*HIDDEN).target.layout) == 1
    assert tokens_dim_of(target("batch", "heads", "tokens", "tokens").target.layout) is None
    assert tokens_dim_of(target("batch", "channels").target.layout) is None
    assert tokens_dim_of(None) is None
