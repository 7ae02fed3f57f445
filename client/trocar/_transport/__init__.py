"""Channels, retries, shared memory and failures of calls."""
