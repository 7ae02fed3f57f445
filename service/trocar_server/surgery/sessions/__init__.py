"""Context managers over one pass: hooks, taps, edits, gradients."""
