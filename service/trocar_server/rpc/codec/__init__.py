"""Codec: messages to plans, and results to messages."""
