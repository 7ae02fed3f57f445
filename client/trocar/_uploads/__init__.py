"""Data sets on their way to the server: samples into shards, shards into messages."""
