"""Optimizers, schedules and moving averages."""
