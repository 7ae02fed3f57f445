"""Reductions and casts of feature maps on the device, before transfer; usable alone on any tensor.

    from trocar_server.tensors.reductions import Cast, Pool, PoolKind, TopK, cast_value, reduce_value

    pooled = reduce_value(feature_map, [Pool(PoolKind.AVG)])
    best = reduce_value(logits, [TopK(5)])
    best.value, best.companions["indices"]
    cast_value(pooled.value, Cast(torch.int8), pooled.channel_dim).scales

`reduced_signature` infers the resulting signature without a value.
"""

from trocar_server.tensors.reductions.apply_reductions import (
    Reduced,
    check_reductions,
    reduce_value,
    reduced_signature,
)
from trocar_server.tensors.reductions.casting import CastValue, cast_value
from trocar_server.tensors.reductions.casts import Cast, CastSignature, cast_signature
from trocar_server.tensors.reductions.lens import Head
from trocar_server.tensors.reductions.positions import Positions, PositionSet, PromptTokens, TextSpan
from trocar_server.tensors.reductions.reduction import (
    Axis,
    Crop,
    Gram,
    Grid,
    Index,
    Lens,
    OperandSpec,
    Pca,
    Peak,
    Pool,
    PooledNorm,
    PoolKind,
    Projection,
    Readout,
    Reduction,
    Slice,
    Spans,
    Take,
    TokenRows,
    TopK,
    dtype_name,
    operand_specs,
)

__all__ = [
    "Axis",
    "Cast",
    "CastSignature",
    "CastValue",
    "Crop",
    "Gram",
    "Grid",
    "Head",
    "Index",
    "Lens",
    "OperandSpec",
    "Pca",
    "Peak",
    "Pool",
    "PoolKind",
    "PooledNorm",
    "PositionSet",
    "Positions",
    "Projection",
    "PromptTokens",
    "Readout",
    "Reduced",
    "Reduction",
    "Slice",
    "Spans",
    "Take",
    "TextSpan",
    "TokenRows",
    "TopK",
    "cast_signature",
    "cast_value",
    "check_reductions",
    "dtype_name",
    "operand_specs",
    "reduce_value",
    "reduced_signature",
]
