"""Servers, processes and networks for tests."""
