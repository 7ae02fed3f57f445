"""Plan execution on the owner thread, and its results."""
