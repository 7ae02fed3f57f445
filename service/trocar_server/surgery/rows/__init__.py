"""Rows of a batch: a proof that each row of a pass depends on its own row of the inputs alone."""
