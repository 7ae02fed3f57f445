"""Shard writers, one module for each format; `formats.FORMATS` has them by name."""
