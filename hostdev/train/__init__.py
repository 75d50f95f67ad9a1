"""The command `hostdev train`, built on `hostdev.runtime`: its options, its run directory and its report."""
