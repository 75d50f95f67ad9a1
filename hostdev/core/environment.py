"""Settings for the C libraries that torch uses in a training process.

Import this module before torch: the libraries read the settings only once. Environment variables that the user has set
are kept.
"""

import os

from hostdev.core.machine import keep_freed_memory

# GNU OpenMP's idle threads spin for milliseconds by default, on cores that the host kernels need.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# torch's CPU allocator requests huge pages for tensors of many MiB.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# hostdev reports a lost process itself; torch's store would also print a stack trace.
if {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK_TABLE_FILE"} & os.environ.keys():
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

keep_freed_memory()
