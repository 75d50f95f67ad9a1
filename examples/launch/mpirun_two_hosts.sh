#!/usr/bin/env bash
# Use two hosts by Open MPI: HOSTS=first:1,second:1 examples/launch/mpirun_two_hosts.sh --data DIR ...
# Rank 0 runs on the first host, and the others connect to it there.
set -euo pipefail
exec mpirun ${MPIRUN_OPTIONS:-} -n "${PROCESSES:-2}" -H "$HOSTS" --bind-to none \
    -x MASTER_ADDR="${HOSTS%%:*}" -x MASTER_PORT="${MASTER_PORT:-29500}" \
    python -m hostdev.train --host-device-mix --micro-batches 4 "$@"
