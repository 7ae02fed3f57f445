"""Blocks in memory, on disk and on devices, and the threads that move them."""
