"""The formats by name."""

from trocar._datasets.writers.numpy import NUMPY
from trocar._datasets.writers.parquet import PARQUET
from trocar._datasets.writers.safetensors import SAFETENSORS
from trocar._datasets.writers.shard import Format
from trocar._datasets.writers.zarr import ZARR

FORMATS: dict[str, Format] = {format.name: format for format in (SAFETENSORS, ZARR, PARQUET, NUMPY)}
