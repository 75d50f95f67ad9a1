#!/usr/bin/env bash
# Start two processes on this host by torchrun: examples/launch/torchrun.sh --data DIR ... (options of hostdev.train)
set -euo pipefail
exec torchrun --nproc-per-node "${PROCESSES:-2}" --master-port "${MASTER_PORT:-29500}" \
    -m hostdev.train --host-device-mix --micro-batches 4 "$@"
