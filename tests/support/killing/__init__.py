"""Killing a server that does everything at once: see `tests.kills`."""
