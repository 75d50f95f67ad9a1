"""Tables in host memory and the server that names them; over kernels/, and like it without torch."""
