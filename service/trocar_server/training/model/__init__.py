"""A trainer's module tree: head, trained parameters, modes, random state."""
