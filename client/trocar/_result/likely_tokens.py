"""Likely tokens: what a model, or a lens on one of its layers, expects next."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from trocar._base.tensors import Array

LENS = ":lens"
"""The end of the names of a lens without an alias."""
IDS = ".indices"
"""Behind these: the names of the ids."""


@dataclass(frozen=True)
class LikelyToken:
    """A token that could follow."""

    token_id: int
    """Its id."""
    text: str
    """Its text, alone."""
    logprob: float
    """The logarithm of its probability, before temperature, penalties and bias."""


def likely_tokens(
    logprobs: Array, token_ids: Array, texts: Mapping[int, str]
) -> list[tuple[LikelyToken, ...]]:
    """Return the tokens of each position, most likely first.

    Args:
        logprobs: Of shape (positions, k).
        token_ids: Of the same shape.
        texts: By id.
    """
    return [
        tuple(
            LikelyToken(token_id, texts.get(token_id, ""), logprob)
            for token_id, logprob in zip(ids.tolist(), values.tolist(), strict=True)
        )
        for ids, values in zip(token_ids, logprobs, strict=True)
    ]


def lens_name(name: str, names: Container[str], expansions: Mapping[str, Sequence[str]]) -> str:
    """Return the name of a lens's values: given as it is, or by the selector or the name of what it reads.

    Raises:
        KeyError: No lens has this name.
    """
    of_selector = [each for each in expansions.get(name, ()) if each.endswith(LENS)]
    candidates: list[str] = [f"{name}{LENS}", name, *(of_selector if len(of_selector) == 1 else [])]
    for candidate in candidates:
        if f"{candidate}{IDS}" in names:
            return candidate
    raise KeyError(f"{name!r} is no lens of this call; ask for trocar.lens({name!r})")


def own_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of a selector's values; of its lenses if it was tapped with these alone."""
    values = tuple(name for name in names if not name.removesuffix(IDS).endswith(LENS))
    return values or tuple(names)
