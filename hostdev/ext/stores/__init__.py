"""Object stores and other file systems that fsspec knows."""
