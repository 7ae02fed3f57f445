"""Hugging Face models: folders and repositories, built by transformers; safetensors, never remote code."""
