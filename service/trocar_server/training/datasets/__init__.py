"""Data sets for training: kept durably, read in any order, made into batches.

store = DatasetStore(data_dir / "datasets", max_bytes, max_pixels)
library = DatasetLibrary(store, listed_folders(paths), max_pixels)
reader = library.open("alice", dataset_id)
batch = to_batch(reader.load(indices), reader.info, hosted)
"""

from trocar_server.training.datasets.batches import Augmentation, check_dataset, sample_seed, to_batch
from trocar_server.training.datasets.form import (
    ArrayForm,
    DatasetInfo,
    Manifest,
    SampleForm,
    Shard,
    TargetForm,
)
from trocar_server.training.datasets.incoming import IncomingShard
from trocar_server.training.datasets.library import DatasetLibrary
from trocar_server.training.datasets.listed import ListedFolder, listed_folders
from trocar_server.training.datasets.reader import DatasetReader, LoadedSamples, RawSample
from trocar_server.training.datasets.store import DatasetStore, Upload

__all__ = [
    "ArrayForm",
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
    "SampleForm",
    "Shard",
    "TargetForm",
    "Upload",
    "check_dataset",
    "listed_folders",
    "sample_seed",
    "to_batch",
]
