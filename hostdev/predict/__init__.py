"""Probabilities from a checkpoint: `python -m hostdev.predict` for files, `hostdev.Predictor` in a program."""

WHICH = ("best", "newest")  # of the checkpoints of a run
