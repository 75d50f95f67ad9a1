#!/usr/bin/env bash
# Start two processes on this host in a plain loop. Options of hostdev.train follow.
set -euo pipefail
export WORLD_SIZE="${PROCESSES:-2}" MASTER_ADDR=127.0.0.1 MASTER_PORT="${MASTER_PORT:-29500}"
pids=()
for ((rank = 0; rank < WORLD_SIZE; rank++)); do
    RANK=$rank LOCAL_RANK=$rank python -m hostdev.train --host-device-mix --micro-batches 4 "$@" &
    pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
    wait "$pid" || code=$?
done
exit "$code"
