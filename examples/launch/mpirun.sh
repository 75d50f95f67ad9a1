#!/usr/bin/env bash
# Two processes on this host by mpirun. Open MPI binds each to one CPU unless told otherwise.
set -euo pipefail
exec mpirun ${MPIRUN_OPTIONS:-} -n "${PROCESSES:-2}" --bind-to none \
    python -m hostdev.train --host-device-mix --micro-batches 4 "$@"
