"""Attention scores of scaled dot-product attention, from the arguments of its call.

torch's fused kernels never materialise them, so they are computed separately, where requested.
"""

import math
from typing import Any

import torch

SOFTMAX = "softmax"
"""Another function that computes attention."""


def attention_logits(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return query keyᵀ scale + mask of `torch.nn.functional.scaled_dot_product_attention`.

    Args:
        query: Shape (batch, heads, queries, width); any number of dimensions before the last two.
        key: Shape (batch, heads, keys, width).
        value: Not used; present to match the call's signature.
        attn_mask: Added to the logits, or for bool: whether a query attends to a key.
        dropout_p: Not used: the scores are those before dropout.
        is_causal: Whether a query attends only to keys up to its own position, counted from the first.
        scale: Factor of the products, 1/√width when None.
        enable_gqa: Whether `key` has fewer heads, each for a group of heads of `query`.

    Returns:
        Shape (batch, heads, queries, keys); float32 for half precision. Minus infinity where a bool mask or
        `is_causal` keeps a query from a key; a mask of floats is added.
    """
    del value, dropout_p
    if enable_gqa:
        key = key.repeat_interleave(query.size(-3) // key.size(-3), -3)
    scale = 1 / math.sqrt(query.size(-1)) if scale is None else scale
    dtype = torch.promote_types(query.dtype, torch.float32)
    logits = query.to(dtype) @ key.to(dtype).transpose(-2, -1) * scale
    if is_causal:
        causal = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(causal.logical_not(), -torch.inf)
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        logits = logits.masked_fill(attn_mask.logical_not(), -torch.inf) if is_bool else logits + attn_mask
    return logits


def softmax_of(logits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return attention scores from their logits.

    Each row sums to 1, but is zero where a query attends to no key, as in torch since 2.5.
    """
    scores = logits.softmax(-1).masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0)
    return scores.to(dtype)


def attention_scores(query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return the softmax of `attention_logits`, of the dtype of `query`; it takes the same arguments."""
    return softmax_of(attention_logits(query, *args, **kwargs), query.dtype)


def attention_output(
    scores: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: object,
    enable_gqa: bool = False,
    **__: object,
) -> torch.Tensor:
    """Return the attention output for these scores: scores times value, of the dtype of `query`.

    Args:
        scores: Shape (batch, heads, queries, keys).
        query: Not changed by the scores.
        key: Not used.
        value: Shape (batch, heads, keys, width).
        enable_gqa: Whether `value` has fewer heads, each for a group of heads of `query`.
    """
    del key
    if enable_gqa:
        value = value.repeat_interleave(query.size(-3) // value.size(-3), -3)
    return (scores @ value).to(query.dtype)
