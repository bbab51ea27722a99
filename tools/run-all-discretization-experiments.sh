#!/usr/bin/env bash
# Trains CONFIG with each discretization; without CONFIG UPerNet on ADE20K, then Cascade Mask R-CNN
# on COCO. Arguments and variables are those of tools/run_all_methods.sh (--help).
#
#     VIM_USE_CUDA_KERNEL=0 tools/run-all-discretization-experiments.sh --seeds 0..11 --gpus all
set -euo pipefail
tools=$(dirname "$0")
if [[ -n ${CONFIG:-} || " $* " == *" --help "* || " $* " == *" -h "* ]]; then
    exec bash "$tools/run_all_methods.sh" "$@"
fi
bash "$tools/../seg/run_all_methods.sh" "$@"
bash "$tools/../det/run_all_methods.sh" "$@"
