"""Predictions from a checkpoint: `python -m hostdev.predict` for files, `hostdev.Predictor` in a program."""

WHICH = ("best", "newest")  # choices of a run's checkpoint for predictions
