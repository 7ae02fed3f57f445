"""Cached features of a frozen prefix."""
