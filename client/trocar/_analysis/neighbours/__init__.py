"""Nearest rows of features, by exact comparison with every row."""
