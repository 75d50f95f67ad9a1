#!/usr/bin/env bash
# Start two processes on this host by mpirun. Without --bind-to none, Open MPI binds each to one CPU.
set -euo pipefail
exec mpirun ${MPIRUN_OPTIONS:-} -n "${PROCESSES:-2}" --bind-to none \
    python -m hostdev.train --host-device-mix --micro-batches 4 "$@"
