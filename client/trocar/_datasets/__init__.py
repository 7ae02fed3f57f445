"""Whole data sets through a model, into files: reading, reading ahead, writing, going on after a stop.

sources/          what there is to read: folder, WebDataset, arrays, torch, Hugging Face
decoding, ahead   samples loaded on other threads, in order, a bounded number ahead
batches, results  what is sent, and what comes back
open_shard        the shard in progress on disk, from which a killed run goes on
writers/          a whole shard as safetensors, Zarr, Parquet or NumPy
manifest, output  which shards are complete
job               all of it: `extract_dataset`
features          reading it back: `read_features`
"""
