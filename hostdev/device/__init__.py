"""The device's clock, tables, rows and optimizers, built on torch. May import hostdev.kernels, but not hostdev.host."""
