"""Modules that every other package may import: errors, optimizers, initial values, timed ops, memory, files."""
