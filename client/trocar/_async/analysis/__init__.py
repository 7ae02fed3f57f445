"""Analyses and attributions with asyncio: results of several passes."""
