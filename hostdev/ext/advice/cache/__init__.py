"""Recommended cache sizes, simulated on a data set's own batches, for `hostdev advise` and `--cache-rows auto`."""
