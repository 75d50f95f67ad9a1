"""Parts that every other package may use: errors, optimizers, initial values, timed ops, memory, files."""
