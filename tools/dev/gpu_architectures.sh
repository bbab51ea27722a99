#!/bin/sh
# Called by the Makefile: prints the compute capabilities of the visible GPUs as TORCH_CUDA_ARCH_LIST
# takes them ("8.9;9.0"), or nothing where no GPU is visible.

# Set but empty or -1 hides every GPU from CUDA programs; nvidia-smi shows them all the same.
case ${CUDA_VISIBLE_DEVICES-all} in
    '' | -1) exit 0 ;;
esac
command -v nvidia-smi >/dev/null || exit 0
# Where there is no GPU, nvidia-smi says so on its standard output.
nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null |
    grep -E '^[0-9]+\.[0-9]+$' | sort -u -V | paste -s -d ';'
