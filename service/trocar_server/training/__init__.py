"""Trainers: fine-tuning of hosted models, held by the server.

`spec` says what a client may ask for; `core` runs the steps; `fit` runs epochs; `checkpoints` keeps what was
saved; `datasets` keeps what was uploaded; `feature_cache` runs a frozen prefix once.
"""
