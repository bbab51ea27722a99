#!/usr/bin/env bash
# Trains on a Slurm cluster: slurm_train.sh PARTITION JOB_NAME CONFIG [arguments of train.py]
# GPUS (in total, 8), GPUS_PER_NODE (8), CPUS_PER_TASK (5) and SRUN_ARGS are read from the environment.
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 PARTITION JOB_NAME CONFIG [arguments of train.py]" >&2
    exit 2
fi
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
cpus_per_task=${CPUS_PER_TASK:-5}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$cpus_per_task}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}
# Jobs that share a node must not share a port.
export MASTER_PORT=${PORT:-$((20000 + RANDOM % 20000))}

# Word splitting of SRUN_ARGS is wanted.
# shellcheck disable=SC2086
exec srun --partition="$1" --job-name="$2" --gres="gpu:$gpus_per_node" --ntasks="$gpus" \
    --ntasks-per-node="$gpus_per_node" --cpus-per-task="$cpus_per_task" --kill-on-bad-exit=1 \
    ${SRUN_ARGS:-} "${PYTHON:-python}" -u "$(dirname "$0")/train.py" "$3" "${@:4}" --launcher slurm
