"""Relations between replies: one request asked in two ways has one answer. See `relations.py`."""
