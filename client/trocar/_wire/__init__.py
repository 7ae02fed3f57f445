"""Conversion between messages and the client's own data."""
