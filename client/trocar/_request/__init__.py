"""Requests: inputs, taps, edits, objectives, trainers."""
