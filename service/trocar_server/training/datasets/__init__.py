"""Data sets for training: durable storage, random access, batches.

store = DatasetStore(data_dir / "datasets", max_bytes, max_pixels)
library = DatasetLibrary(store, listed_folders(paths), max_pixels)
reader = library.open("alice", dataset_id)
batch = to_batch(reader.load(indices), reader.info, hosted)
"""

from trocar_server.training.datasets.batch_assembly import Augmentation, check_dataset, sample_seed, to_batch
from trocar_server.training.datasets.dataset_schema import (
    ArraySignature,
    DatasetInfo,
    Manifest,
    SampleSignature,
    Shard,
    TargetSignature,
)
from trocar_server.training.datasets.dataset_store import DatasetStore, Upload
from trocar_server.training.datasets.incoming import IncomingShard
from trocar_server.training.datasets.library import DatasetLibrary
from trocar_server.training.datasets.listed import ListedFolder, listed_folders
from trocar_server.training.datasets.reader import DatasetReader, LoadedSamples, RawSample

__all__ = [
    "ArraySignature",
    "Augmentation",
    "DatasetInfo",
    "DatasetLibrary",
    "DatasetReader",
    "DatasetStore",
    "IncomingShard",
    "ListedFolder",
    "LoadedSamples",
    "Manifest",
    "RawSample",
    "SampleSignature",
    "Shard",
    "TargetSignature",
    "Upload",
    "check_dataset",
    "listed_folders",
    "sample_seed",
    "to_batch",
]
