#!/usr/bin/env bash
# Two hosts by Open MPI: HOSTS=first:1,second:1 examples/launch/mpirun_two_hosts.sh --data DIR ...
# Rank 0 is on the first of them, where the others meet it.
set -euo pipefail
exec mpirun ${MPIRUN_OPTIONS:-} -n "${PROCESSES:-2}" -H "$HOSTS" --bind-to none \
    -x MASTER_ADDR="${HOSTS%%:*}" -x MASTER_PORT="${MASTER_PORT:-29500}" \
    python -m hostdev.train --host-device-mix --micro-batches 4 "$@"
