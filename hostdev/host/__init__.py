"""Tables in host memory, and a server of named tables. Built on kernels/; does not import torch."""

from hostdev.host import key_table as _key_table  # noqa: F401  (`HostTable(None, ...)` is a table by key)
