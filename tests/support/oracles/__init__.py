"""The same results in plain torch."""
