"""Crash-safe storage: durable writes, sealed records, tensor files, the data lock."""
