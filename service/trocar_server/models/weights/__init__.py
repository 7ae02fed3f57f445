"""Weights: files, downloads, conversion of checkpoints, and initial values that a file replaces."""
