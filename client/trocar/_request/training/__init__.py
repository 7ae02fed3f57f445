"""Descriptions of trainers and fits."""
