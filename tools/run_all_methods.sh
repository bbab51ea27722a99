#!/usr/bin/env bash
# Trains the same config with each discretization, one after another, and prints their metrics.
# Usually started by seg/run_all_methods.sh or det/run_all_methods.sh.
#
#     CONFIG=configs/seg/upernet_vim_t_{method}.py tools/run_all_methods.sh [arguments of train.py]
#
# CONFIG    the config; {method} in it stands for the name of the method, which is set either way
# METHODS   the methods (default: the six that are compared; the control, zoh_exact, has to be named)
# GPUS      train by dist_train.sh in this many processes (default: one process, without it)
# WORK_DIR  gets a directory for each run (default: work_dirs)
# PYTHON    the interpreter
#
# A run that finished is skipped, and one that was interrupted resumes, when this is started again
# with the same arguments. Others in the same WORK_DIR are refused: the runs would not compare.
set -euo pipefail
tools=$(dirname "$0")
export PYTHON=${PYTHON:-python}
WORK_DIR=${WORK_DIR:-work_dirs}
compared='from vim_mm.ops import METHODS; print(*(m for m in METHODS if not METHODS[m].control))'
METHODS=${METHODS:-$("$PYTHON" -c "$compared")}

# All of them before any is trained, which may take days.
for method in $METHODS; do
    config=${CONFIG:?the config to train}
    config=${config//"{method}"/$method}
    if [[ ! -e $config ]]; then
        echo "no config $config for the method $method" >&2
        exit 1
    fi
done

runs=()
for method in $METHODS; do
    config=${CONFIG//"{method}"/$method}
    run=$(basename "$config" .py)
    [[ $run == *_"$method" ]] || run+=_$method
    run=$WORK_DIR/$run
    runs+=("$run")

    command="GPUS=${GPUS:-} $config $*"
    mkdir -p "$run"
    if [[ -e $run/command && $(<"$run/command") != "$command" ]]; then
        echo "$run holds the run of other arguments: $(<"$run/command")" >&2
        echo "Set WORK_DIR to another directory, or remove this one." >&2
        exit 1
    fi
    echo "$command" > "$run/command"
    if [[ -e $run/finished ]]; then
        echo "$run is finished."
        continue
    fi

    arguments=("$@" --resume --work-dir "$run")
    arguments+=(--cfg-options "model.backbone.discretization_method=$method")
    if [[ -n ${GPUS:-} ]]; then
        bash "$tools/dist_train.sh" "$config" "$GPUS" "${arguments[@]}"
    else
        "$PYTHON" "$tools/train.py" "$config" "${arguments[@]}"
    fi
    touch "$run/finished"
done
"$PYTHON" "$tools/compare_runs.py" "${runs[@]}"
