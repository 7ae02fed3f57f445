"""Formats by name."""

from trocar._export.writers.numpy_writer import NUMPY
from trocar._export.writers.parquet_writer import PARQUET
from trocar._export.writers.safetensors_writer import SAFETENSORS
from trocar._export.writers.shard_writer import ShardFormat
from trocar._export.writers.zarr_writer import ZARR

FORMATS: dict[str, ShardFormat] = {format.name: format for format in (SAFETENSORS, ZARR, PARQUET, NUMPY)}
