"""Losses: terms, targets, taps, teachers, penalties."""
