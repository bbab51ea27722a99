#!/usr/bin/env bash
# Trains UPerNet with Vim-Ti on ADE20K once for each discretization; tools/run_all_methods.sh says
# how to choose another config, several GPUs, or fewer methods.
root=$(dirname "$0")/..
export CONFIG=${CONFIG:-"$root/configs/seg/upernet_vim_t_{method}.py"}
exec bash "$root/tools/run_all_methods.sh" "$@"
