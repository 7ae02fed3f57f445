"""Execution of one forward and backward pass: arguments, collection, scores."""
