"""Resolution of selectors to targets in a recorded pass."""
