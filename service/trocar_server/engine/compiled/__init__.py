"""Compiled variants of frequent passes."""
