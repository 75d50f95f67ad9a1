"""The device side, over torch: clock, tables, rows and optimizers. May call kernels/, never host/."""
