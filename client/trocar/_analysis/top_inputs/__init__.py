"""Inputs that drive channels most."""
