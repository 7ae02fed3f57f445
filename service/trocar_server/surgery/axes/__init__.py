"""Axes: what each dimension of each value of a pass means, from its operations."""
