"""The blocking client: generated from `_async` by tools/generate_sync.py, do not edit."""
