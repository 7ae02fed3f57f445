"""Attention scores, against torch's own function and weights."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from trocar_server.surgery.sessions.attention import attention_scores

GENERATOR = torch.Generator().manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64).to(dtype)


MASKED_ROW = torch.tensor([[True, False, True], [False, False, False]])
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.3},
    "bool mask": {"attn_mask": torch.tensor([[True, False, True], [False, True, True]])},
    "float mask of each sample": {"attn_mask": normal(2, 1, 2, 3)},
    "mask with -inf": {"attn_mask": torch.tensor([[0.0, -torch.inf, 1.0], [0.0, 0.0, -torch.inf]])},
    "a query that sees nothing": {"attn_mask": MASKED_ROW},
}


@pytest.mark.parametrize("case", CASES)
def test_scores_times_values_are_what_the_function_returns(case: str) -> None:
    query, key, value = normal(2, 4, 2, 8), normal(2, 4, 3, 8), normal(2, 4, 3, 5)
    expected = F.scaled_dot_product_attention(query, key, value, **CASES[case])
    scores = attention_scores(query, key, value, **CASES[case])
    assert scores.shape == (2, 4, 2, 3)
    torch.testing.assert_close(scores @ value, expected, rtol=0, atol=1e-6)


def test_heads_of_queries_share_heads_of_keys() -> None:
    query, key, value = normal(2, 8, 2, 8), normal(2, 2, 3, 8), normal(2, 2, 3, 5)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    scores = attention_scores(query, key, value, enable_gqa=True)
    torch.testing.assert_close(scores @ value.repeat_interleave(4, 1), expected, rtol=0, atol=1e-6)


def test_scores_are_the_weights_of_multihead_attention() -> None:
    torch.manual_seed(7)
    module, rows = nn.MultiheadAttention(16, 4, bias=False, batch_first=True).eval(), normal(2, 5, 16)
    _, expected = module(rows, rows, rows, need_weights=True, average_attn_weights=False)
    projected = F.linear(rows, module.in_proj_weight).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    query, key, value = projected
    torch.testing.assert_close(attention_scores(query, key, value), expected, rtol=1e-6, atol=1e-7)


def test_a_row_sums_to_one_and_to_zero_where_a_query_sees_nothing() -> None:
    scores = attention_scores(normal(1, 2, 8), normal(1, 3, 8), normal(1, 3, 8), attn_mask=MASKED_ROW)
    torch.testing.assert_close(scores.sum(-1), torch.tensor([[1.0, 0.0]]))


def test_nan_stays_nan() -> None:
    query = normal(1, 2, 8)
    query[0, 0, 0] = torch.nan
    scores = attention_scores(query, normal(1, 3, 8), normal(1, 3, 8))
    assert scores[0, 0].isnan().all()
    assert not scores[0, 1].isnan().any()


def test_dropout_does_not_touch_the_scores() -> None:
    rows = normal(1, 3, 8)
    assert torch.equal(attention_scores(rows, rows, rows, None, 0.5), attention_scores(rows, rows, rows))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_scores_have_the_dtype_of_the_queries_and_its_precision(dtype: torch.dtype) -> None:
    query, key, value = (normal(2, 4, 3, 8, dtype=dtype) for _ in range(3))
    expected = attention_scores(query.double(), key.double(), value.double())
    scores = attention_scores(query, key, value)
    assert scores.dtype == dtype
    torch.testing.assert_close(scores.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7)


def test_the_shape_is_known_without_data() -> None:
    query, key = torch.empty(2, 4, 5, 8, device="meta"), torch.empty(2, 4, 7, 8, device="meta")
    mask = torch.empty(5, 7, dtype=torch.bool, device="meta")
    assert attention_scores(query, key, key, mask).shape == (2, 4, 5, 7)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (0, 3)])
def test_short_and_empty_sequences_work(queries: int, keys: int) -> None:
    scores = attention_scores(normal(1, 2, queries, 8), normal(1, 2, keys, 8), normal(1, 2, keys, 8))
    assert torch.equal(scores, torch.ones(1, 2, queries, keys))
