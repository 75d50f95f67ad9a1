"""CPU kernels: numba and numpy only, pure functions on arrays."""
