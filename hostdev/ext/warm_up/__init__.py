"""`hostdev warm-up`: compile all kernels, so that no command has to wait for them."""
