"""The command `python -m hostdev.train`, a user of `hostdev.runtime`: options, run folder, report."""
