"""Specs of trainers and fits, with their syntactic validation."""
