"""Data set export: samples through a model into files, with prefetch and resume after a stop.

decoding, ahead               samples loaded on other threads, in order, a bounded number ahead
sample_batches, rows          batches sent, and the rows of their feature maps
results                       replies of the batches, in order
schema, writers/              columns; a complete shard as safetensors, Zarr, Parquet or NumPy
open_shard                    the shard in progress on disk, from which a killed run resumes
manifest, output_folder       which shards are complete
description, edit_descriptions   the job as the manifest keeps it
options, job                  all of it: `extract_dataset`
features                      reading it back: `read_features`
"""
