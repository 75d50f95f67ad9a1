"""`hostdev checkpoint`: describe, check, compare, merge, deliver and export checkpoints."""
