#!/usr/bin/env bash
# On each host, start the processes that a rank table lists for it: examples/launch/rank_table.sh --data DIR ...
set -euo pipefail
exec python -m hostdev.launch --rank-table "${RANK_TABLE:-$(dirname "$0")/rank_table.json}" -- \
    -m hostdev.train --host-device-mix --micro-batches 4 "$@"
