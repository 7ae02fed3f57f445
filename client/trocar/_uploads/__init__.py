"""Data set uploads: samples into shards, shards into messages."""
