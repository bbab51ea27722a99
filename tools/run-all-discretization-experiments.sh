#!/usr/bin/env bash
# Trains CONFIG with each discretization; without CONFIG UPerNet on ADE20K, then Cascade Mask R-CNN
# on COCO. Arguments and variables are those of tools/run_all_methods.sh (--help).
#
#     VIM_USE_CUDA_KERNEL=0 tools/run-all-discretization-experiments.sh --seeds 0..11 --gpus all
set -euo pipefail
tools=$(dirname "$0")
if [[ -n ${CONFIG:-} || " $* " == *" --config"[\ =]* || " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec bash "$tools/run_all_methods.sh" "$@"
fi
# A failure of the one task leaves the other; what stops this script stops both.
failed=0
for task in seg det; do
    code=0
    bash "$tools/../$task/run_all_methods.sh" "$@" || code=$?
    ((code < 128)) || exit "$code"
    ((code == 0)) || failed=$code
done
exit "$failed"
