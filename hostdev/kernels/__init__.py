"""CPU kernels: functions that depend on nothing but numba, numpy and their arguments."""
