"""Logit lens: vectors to the most likely tokens, by the norm and head of a model."""

from dataclasses import replace
from typing import Protocol

import torch

from trocar_server.tensors.reductions.reduction import Lens
from trocar_server.tensors.reductions.reduction_stage import Stage

_CHUNK_BYTES = 64 << 20
_NUMBER_BYTES = 12
"""Of one score: as the model computes it, in float32, and as a logarithm."""


class Head(Protocol):
    """What follows the last block of a model."""

    @property
    def vocabulary(self) -> int:
        """The number of tokens."""
        ...

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the scores of each token, (rows, vocabulary), of vectors (rows, width)."""
        ...


def lens(stage: Stage, wanted: Lens, head: Head | None) -> Stage:
    """Apply the head to every vector; the logarithms of probabilities are in float32.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the last dimension is not that of the channels, or no floats.
    """
    stage.need_floats(wanted)
    if stage.need_channels(wanted) != len(stage.shape) - 1:
        raise stage.refuse(wanted, "its channels are not the last dimension; a lens takes (.., width)")
    shape = (*stage.shape[:-1], wanted.top_k)
    if stage.value.is_meta:
        values, ids = (stage.value.new_empty(shape, dtype=dtype) for dtype in (torch.float32, torch.int64))
    elif head is None:
        raise stage.refuse(wanted, "a lens is a readout of language models")
    else:
        values, ids = (each.reshape(shape) for each in _likely(stage.value, wanted.top_k, head))
    return replace(stage.to(values, _CHUNK_BYTES), companions={**stage.companions, "indices": ids})


def _likely(value: torch.Tensor, top_k: int, head: Head) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and ids of the most likely tokens, (rows, top_k)."""
    rows = value.reshape(-1, value.shape[-1])
    count = max(1, _CHUNK_BYTES // (head.vocabulary * _NUMBER_BYTES))
    parts = [head.scores(part).float().log_softmax(-1).topk(top_k) for part in rows.split(count)]
    return torch.cat([part.values for part in parts]), torch.cat([part.indices for part in parts])
