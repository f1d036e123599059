#!/usr/bin/env bash
# What a batch gains: seconds and peak memory of ours for batches of one prompt (tests/support/bench_batch.py).
#
#   BATCHES="1 2 4" SLUG=cosmos-predict2.5-2b bash bench_batch.sh
set -euo pipefail

support=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../../../../tests/support")
python "$support/bench_batch.py" "${SLUG:-cosmos-predict2.5-2b}" "${CHUNKS:-1}" ${BATCHES:-1 2 4}
