"""The command `hostdev train`, built on `hostdev.runtime`: options, run directory, report."""
