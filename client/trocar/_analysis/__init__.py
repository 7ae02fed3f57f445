"""Analyses of feature maps and statistics on the client: NumPy only, no torch, no SciPy.

Each module has the mathematics and the result of one function; `_async.analysis.analysis_passes` runs the
passes.
"""
