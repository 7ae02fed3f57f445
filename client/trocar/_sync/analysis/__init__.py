"""Analyses and attributions: results of several passes."""
