"""The device side, over torch: its clock, tables, rows and optimizers. May call kernels/, never host/."""
