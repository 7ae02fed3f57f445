"""Trainers: server-side fine-tuning of hosted models.

`spec` describes trainers and fits; `step` runs training steps; `fit` runs epochs; `files` stores checkpoints
and published models; `datasets` stores uploads; `features` caches the outputs of a frozen prefix.
"""
