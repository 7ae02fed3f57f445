"""A whole shard to files, one module for each format; `formats.FORMATS` has them by name."""
