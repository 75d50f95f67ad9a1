"""The fixtures of tests/distributed."""

from tests.distributed.conftest import (  # noqa: F401
    _restore_torch,
    alone,
    cache_folder,
    processes,
)
