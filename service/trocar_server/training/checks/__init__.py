"""Checks of a trainer's description against its model."""
