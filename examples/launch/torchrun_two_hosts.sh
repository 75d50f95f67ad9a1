#!/usr/bin/env bash
# Run on both hosts: NODE_RANK=0 (and 1) MASTER_ADDR=FIRST_HOST examples/launch/torchrun_two_hosts.sh --data DIR ...
# Both hosts need the data set under the same name, and both must see the run directory and the checkpoints.
set -euo pipefail
exec torchrun --nnodes 2 --node-rank "$NODE_RANK" --nproc-per-node "${PROCESSES:-1}" \
    --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    -m hostdev.train --host-device-mix --micro-batches 4 "$@"
