"""The device's clock, tables, rows and optimizers, built on torch. It may call kernels/, but never host/."""
