"""Tables in host memory, and a server of named tables. Built on kernels/; does not import torch."""
