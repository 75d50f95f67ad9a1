#!/usr/bin/env bash
# This host's processes of a rank table: examples/launch/rank_table.sh --data DIR ... On each host of the table.
set -euo pipefail
exec python -m hostdev.launch --rank-table "${RANK_TABLE:-$(dirname "$0")/rank_table.json}" -- \
    -m hostdev.train --host-device-mix --micro-batches 4 "$@"
