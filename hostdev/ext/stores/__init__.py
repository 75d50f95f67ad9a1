"""Object stores and other file systems that fsspec knows, and the bounded folder through which their files are read."""
