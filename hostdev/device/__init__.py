"""The device's clock, tables, rows and optimizers, built on torch; it may import hostdev.kernels, not hostdev.host."""
