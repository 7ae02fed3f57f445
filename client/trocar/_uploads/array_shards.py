"""Array shards: views of the caller's memory, without copies if it is C-contiguous."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from trocar._base.tensors import Array, named_array
from trocar._uploads.shards import (
    Parts,
    Shard,
    Tensor,
    array_parts,
    check_dtype,
    make_shard,
    target_key,
)
from trocar._uploads.upload_plan import UploadPlan

_WIDER = {"uint16": "int64", "uint32": "int64", "uint64": "int64"}


def array_plan(inputs: object, targets: object, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of arrays.

    Args:
        inputs: (samples, ...).
        targets: (samples, ...), an array or a list; or a mapping of several by name; or None. Texts become
            labels, in alphabetical order.
        name: Name of the data set.
        shard_bytes: Of one shard.

    Raises:
        TypeError: A dtype cannot be stored.
        ValueError: They are not for the same number of samples, or for none.
    """
    array, dtype = named_array(inputs)
    tensors = {"inputs": Tensor(check_dtype(dtype, "the inputs"), array)}
    categories: tuple[str, ...] = ()
    for target, value in named_targets(targets).items():
        tensor, result = target_tensor(value, target)
        tensors[target_key(target)], categories = tensor, result or categories
    count = _count(tensors)
    return UploadPlan(name, categories, count, partial(_shards, tensors, count, shard_bytes))


def target_tensor(value: object, name: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return targets as a tensor, and the categories where they were texts.

    Raises:
        TypeError: They cannot be stored.
    """
    array, dtype = named_array(np.asarray(value) if isinstance(value, (list, tuple)) else value)
    if array.dtype.kind in "UT":
        names, labels = np.unique(array, return_inverse=True)
        return Tensor("int64", labels.reshape(array.shape).astype(np.int64)), tuple(map(str, names))
    if dtype in _WIDER and (not array.size or int(array.max()) < 1 << 63):
        array, dtype = array.astype(_WIDER[dtype]), _WIDER[dtype]
    return Tensor(check_dtype(dtype, f"targets {name!r}" if name else "the targets"), array), ()


def named_targets(targets: object) -> Mapping[str, Any]:
    """Return targets by name; a single one has the name ""."""
    if targets is None:
        return {}
    return targets if isinstance(targets, Mapping) else {"": targets}


def _count(tensors: Mapping[str, Tensor]) -> int:
    counts = {name: tensor.array.shape[0] if tensor.array.ndim else 0 for name, tensor in tensors.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name} for {count}" for name, count in counts.items())
        raise ValueError(f"inputs and targets are for the same samples; here are {shown}")
    if not counts["inputs"]:
        raise ValueError("no samples; the first dimension of inputs and targets is the sample dimension")
    return counts["inputs"]


def _shards(tensors: Mapping[str, Tensor], count: int, shard_bytes: int) -> Iterator[Shard]:
    row_bytes = sum(tensor.array.nbytes for tensor in tensors.values()) // count
    step = max(1, shard_bytes // max(1, row_bytes))
    for start in range(0, count, step):
        stop = min(start + step, count)
        yield make_shard(partial(_build, tensors, start, stop), stop - start)


def _build(tensors: Mapping[str, Tensor], start: int, stop: int) -> Parts:
    rows: dict[str, Array] = {name: tensor.array[start:stop] for name, tensor in tensors.items()}
    return array_parts({name: Tensor(tensors[name].dtype, array) for name, array in rows.items()})
