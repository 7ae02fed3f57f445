"""Payload transfer: chunks, streams, shared memory, compression, caches of requests and replies."""
