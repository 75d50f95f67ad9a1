"""Clusters for tests: workers in threads of the test's process, or processes of their own."""

from contextlib import contextmanager

from hostdev.kernels import jit
from hostdev.kernels.pool import host_threads, set_host_threads


def files_of(folder):
    """Return the bytes of all files of a data set by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def local_cluster(workers=2):
    """Run a scheduler and workers in threads of this process, so that a test can change what they call."""
    from distributed import LocalCluster

    turns, threads = jit._turns, host_threads()
    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address=None,
        silence_logs=50,
    )
    try:
        yield cluster.scheduler_address
    finally:
        cluster.close()
        jit.take_turns(turns)
        set_host_threads(threads)
