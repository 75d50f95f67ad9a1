"""`hostdev serve`: predictions over HTTP, by the Open Inference Protocol v2 and as JSON rows with names."""
