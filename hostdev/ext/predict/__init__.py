"""Predictions from a checkpoint: `python -m hostdev.predict` for files, `hostdev.Predictor` in a program."""

WHICH = ("best", "newest")  # which checkpoint of a run predicts
