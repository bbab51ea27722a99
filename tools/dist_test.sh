#!/usr/bin/env bash
# Tests in several processes: dist_test.sh CONFIG CHECKPOINT GPUS [arguments of test.py]
# Without GPUs, GPUS is the number of processes on the CPU. Several nodes: see torchrun.sh.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 CONFIG CHECKPOINT GPUS [arguments of test.py]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/torchrun.sh" test.py "$3" "$1" "$2" "${@:4}"
