"""Blocks as safetensors files: folders, headers, encoding, direct I/O."""
