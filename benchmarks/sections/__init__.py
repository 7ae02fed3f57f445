"""Sections of `docs/performance.md`: a module each, with `run(effort)`, which returns its tables."""
