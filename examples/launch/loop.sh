#!/usr/bin/env bash
# Two processes on this host by a plain loop.
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
