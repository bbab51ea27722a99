#!/usr/bin/env bash
# Measures trained models: each RUN is the folder of a run, which gets benchmark.json and
# benchmark.md of its own config and last weights. BENCHMARK holds arguments of
# benchmark_latency_flops.py, PYTHON the interpreter.
#
#     BENCHMARK='--sizes 512 --forms eager graph' tools/analysis/run_benchmark_after_training.sh RUN...
set -euo pipefail
here=$(dirname "$0")
if [[ $# -eq 0 || $1 == -* ]]; then
    sed -n '2,6s/^# \?//p' "$0"
    [[ ${1:-} == -h || ${1:-} == --help ]] && exit 0
    exit 2
fi
. "$here/../_python.sh"
failed=0
for run in "$@"; do
    # shellcheck disable=SC2086 # several words
    "$python" "$here/benchmark_latency_flops.py" "$run" \
        --out "$run/benchmark.json" --markdown "$run/benchmark.md" ${BENCHMARK:-} || failed=1
done
exit $failed
