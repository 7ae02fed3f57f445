"""Options of `trocar extract` that take one of a few words."""

from enum import StrEnum


class Format(StrEnum):
    """How shards are written."""

    SAFETENSORS = "safetensors"
    ZARR = "zarr"
    PARQUET = "parquet"
    NPY = "npy"


class Decode(StrEnum):
    """Who decodes images."""

    SERVER = "server"
    CLIENT = "client"


class OnError(StrEnum):
    """What to do with samples that fail."""

    STOP = "stop"
    SKIP = "skip"
