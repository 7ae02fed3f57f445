"""What is computed on the client from feature maps and statistics: NumPy only, no torch, no SciPy.

Each module has the mathematics and the result of one function; `trocar._aio_analysis` runs the passes.
"""
