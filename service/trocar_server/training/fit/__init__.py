"""Fits: epochs over a data set, with events, metrics and checkpoints."""
