"""Trainers on disk: checkpoints, published models, events, exports."""
