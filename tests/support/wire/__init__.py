"""Requests by hand and at random."""
