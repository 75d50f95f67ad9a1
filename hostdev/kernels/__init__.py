"""CPU kernels, written with numba and NumPy: their results depend only on their arguments."""
