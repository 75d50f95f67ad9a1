"""The device side, over torch: clock, tables, rows and optimizers. It may call kernels/, never host/."""
