#!/usr/bin/env bash
# Starts SCRIPT of this folder in PROCESSES processes on this node; dist_train.sh and dist_test.sh
# are the usual ways in. On a machine without GPUs the processes use the CPU.
#
# One node finds a free port by itself. For several, run this on each with NNODES, NODE_RANK,
# MASTER_ADDR (the host of node 0) and PORT set. PYTHON chooses the interpreter.
set -euo pipefail
if [ $# -lt 2 ]; then
    echo "usage: $0 SCRIPT PROCESSES [arguments of SCRIPT]" >&2
    exit 2
fi
script=$(dirname "$0")/$1
processes=$2
shift 2
if ! [[ $processes =~ ^[1-9][0-9]*$ ]]; then
    echo "torchrun.sh: error: the number of processes must be a whole number from 1, got '$processes'" >&2
    exit 2
fi

if [ "${NNODES:-1}" -eq 1 ]; then
    rendezvous=(--standalone --local-addr 127.0.0.1)
else
    rendezvous=(
        --nnodes "$NNODES"
        --node-rank "${NODE_RANK:?the number of this node, from 0}"
        --master-addr "${MASTER_ADDR:?the host of node 0}"
        --master-port "${PORT:?a free port of node 0}"
    )
fi

# With GPUs the cores are for the loaders' workers; without, the processes share them. The same for
# every method, whatever it computes.
if [[ "${CUDA_VISIBLE_DEVICES-all}" != "" ]] && nvidia-smi -L > /dev/null 2>&1; then
    threads=1
else
    threads=$(($(nproc) / processes))
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}

export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-PASSIVE} # threads that wait leave their core to others

. "$(dirname "$0")/_python.sh"
exec "$python" "$(dirname "$0")/_torchrun.py" "${rendezvous[@]}" --nproc-per-node "$processes" \
    "$script" "$@" --launcher pytorch
