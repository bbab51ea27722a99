#!/usr/bin/env bash
# Trains in several processes: dist_train.sh CONFIG GPUS [arguments of train.py]
# Without GPUs, GPUS is the number of processes on the CPU. Several nodes: see torchrun.sh.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 CONFIG GPUS [arguments of train.py]" >&2
    exit 2
fi
exec bash "$(dirname "$0")/torchrun.sh" train.py "$2" "$1" "${@:3}"
