#!/usr/bin/env bash
# Trains on a Slurm cluster: slurm_train.sh PARTITION JOB_NAME CONFIG [arguments of train.py]
#
# Runs in this terminal by srun, or with TIME set as a job in the queue (sbatch) that survives its
# time limit: shortly before it, the job queues itself again and resumes from its last checkpoint.
#
# GPUS            in total (8)
# GPUS_PER_NODE   (8, or GPUS if that is less)
# CPUS_PER_TASK   cores for each GPU, which its loader's workers use (5)
# ACCOUNT         whose hours these are
# TIME            limit of one job, such as 12:00:00; queues the job
# GRACE           seconds before the limit at which it stops and queues again (120)
# SRUN_ARGS, SBATCH_ARGS   further options of srun and sbatch
set -euo pipefail
if [ $# -lt 3 ]; then
    echo "usage: $0 PARTITION JOB_NAME CONFIG [arguments of train.py]" >&2
    exit 2
fi
tools=$(cd "$(dirname "$0")" && pwd)
# shellcheck source=tools/_python.sh
. "$tools/_python.sh"
gpus=${GPUS:-8}
gpus_per_node=${GPUS_PER_NODE:-$((gpus < 8 ? gpus : 8))}
resources=(
    --partition="$1" --job-name="$2" ${ACCOUNT:+--account="$ACCOUNT"}
    --gres="gpu:$gpus_per_node" --ntasks="$gpus" --ntasks-per-node="$gpus_per_node"
    --cpus-per-task="${CPUS_PER_TASK:-5}"
)

if [[ -n ${TIME:-} && -z ${SLURM_JOB_ID:-} ]]; then
    # A job that is queued again continues by itself; a new one, if it is not told otherwise.
    case " $* " in
        *' --resume'* | *' --overwrite '*) ;;
        *) set -- "$@" --resume ;;
    esac
    command=$(printf '%q ' bash "$tools/slurm_train.sh" "$@")
    # Word splitting of SBATCH_ARGS is wanted.
    # shellcheck disable=SC2086
    exec sbatch "${resources[@]}" --time="$TIME" --requeue --open-mode=append \
        --signal="B:USR1@${GRACE:-120}" ${SBATCH_ARGS:-} --wrap "exec $command"
fi

# The cores are for the loaders' workers, with every method.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$OMP_NUM_THREADS}
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY-PASSIVE} # threads that wait leave their core to others
# Jobs that share a node must not share a port.
export MASTER_PORT=${PORT:-$((20000 + RANDOM % 20000))}

# shellcheck disable=SC2206
step=(srun "${resources[@]}" --kill-on-bad-exit=1 ${SRUN_ARGS:-})
step+=("$python" -u "$tools/train.py" "$3" "${@:4}" --launcher slurm)
if [[ -z ${TIME:-} ]]; then
    exec "${step[@]}"
fi

# A trap waits for a command in the foreground, not for one that `wait` waits for.
"${step[@]}" &
training=$!
queue_again() {
    echo "The time limit is near: job $SLURM_JOB_ID is queued again and will resume."
    kill "$training" 2> /dev/null || true
    wait "$training" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap queue_again USR1
wait "$training"
