"""Mapping between the protocol's datatypes and torch's."""

from dataclasses import dataclass

import numpy as np

from trocar_server.engine.request.dtypes import DTYPES, Dtype
from trocar_server.rpc.codec.fields import invalid

BYTES = "BYTES"
"""Strings of bytes: encoded images, or texts for a model with a tokenizer."""


@dataclass(frozen=True)
class Datatype:
    """One datatype.

    Attributes:
        name: As in requests, for example `FP32`.
        dtype: torch's.
        contents: The field of `InferTensorContents` for its elements; None where only raw bytes will do.
        number: Of Triton's `DataType`.
    """

    name: str
    dtype: Dtype
    contents: str | None
    number: int

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """NumPy's dtype of typed elements."""
        return np.dtype(str(self.dtype).removeprefix("torch."))


_DATATYPES = (
    Datatype("BOOL", DTYPES["bool"], "bool_contents", 1),
    Datatype("UINT8", DTYPES["uint8"], "uint_contents", 2),
    Datatype("UINT16", DTYPES["uint16"], "uint_contents", 3),
    Datatype("UINT32", DTYPES["uint32"], "uint_contents", 4),
    Datatype("UINT64", DTYPES["uint64"], "uint64_contents", 5),
    Datatype("INT8", DTYPES["int8"], "int_contents", 6),
    Datatype("INT16", DTYPES["int16"], "int_contents", 7),
    Datatype("INT32", DTYPES["int32"], "int_contents", 8),
    Datatype("INT64", DTYPES["int64"], "int64_contents", 9),
    Datatype("FP16", DTYPES["float16"], None, 10),
    Datatype("FP32", DTYPES["float32"], "fp32_contents", 11),
    Datatype("FP64", DTYPES["float64"], "fp64_contents", 12),
    Datatype("BF16", DTYPES["bfloat16"], None, 14),
)
_BY_NAME = {datatype.name: datatype for datatype in _DATATYPES}
_BY_DTYPE = {datatype.dtype: datatype for datatype in _DATATYPES}


def datatype_named(field: str, name: str) -> Datatype:
    """Return a datatype.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there is none of this name.
    """
    if name not in _BY_NAME:
        known = f"{', '.join(_BY_NAME)}, and {BYTES} for images and texts"
        raise invalid(field, f"no datatype '{name[:80]}'; available: {known}")
    return _BY_NAME[name]


def datatype_of(dtype: Dtype | None) -> Datatype | None:
    """Return the datatype for one of torch's; None where the protocol has none, for complex numbers."""
    return None if dtype is None else _BY_DTYPE.get(dtype)
