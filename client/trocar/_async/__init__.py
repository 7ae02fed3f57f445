"""The asyncio client; `tools/generate_sync.py` generates `_sync` from it."""
