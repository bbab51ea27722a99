#!/usr/bin/env bash
# Trains Cascade Mask R-CNN with Vim-Ti on COCO once for each discretization;
# tools/run_all_methods.sh says how to choose another config, several GPUs, or fewer methods.
root=$(dirname "$0")/..
export CONFIG=${CONFIG:-"$root/configs/det/cascade_mask_rcnn_vim_t_{method}.py"}
exec bash "$root/tools/run_all_methods.sh" "$@"
