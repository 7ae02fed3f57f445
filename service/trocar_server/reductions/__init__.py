"""Reductions and casts of feature maps on the device, before transfer; usable alone on any tensor.

    from trocar_server.reductions import Cast, Pool, PoolKind, TopK, cast_value, reduce_value

    pooled = reduce_value(feature_map, [Pool(PoolKind.AVG)])
    best = reduce_value(logits, [TopK(5)])
    best.value, best.companions["indices"]
    cast_value(pooled.value, Cast(torch.int8), pooled.channel_dim).scales

`reduced_form` says what the same reductions make of a value that does not exist yet.
"""

from trocar_server.reductions.apply import Reduced, check_reductions, reduce_value, reduced_form
from trocar_server.reductions.casting import CastValue, cast_value
from trocar_server.reductions.casts import Cast, CastForm, cast_form
from trocar_server.reductions.reduction import (
    Axis,
    ConstantSpec,
    Crop,
    Gram,
    Index,
    Pca,
    Pool,
    PoolKind,
    Projection,
    Reduction,
    Slice,
    Take,
    TopK,
    constant_specs,
    dtype_name,
)

__all__ = [
    "Axis",
    "Cast",
    "CastForm",
    "CastValue",
    "ConstantSpec",
    "Crop",
    "Gram",
    "Index",
    "Pca",
    "Pool",
    "PoolKind",
    "Projection",
    "Reduced",
    "Reduction",
    "Slice",
    "Take",
    "TopK",
    "cast_form",
    "cast_value",
    "check_reductions",
    "constant_specs",
    "dtype_name",
    "reduce_value",
    "reduced_form",
]
