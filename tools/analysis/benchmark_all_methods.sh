#!/usr/bin/env bash
# Measures whole models with every discretization: CONFIG (default UPerNet with Vim-Ti) by the
# compiled scan and by the Python reference in the same block. {method} in CONFIG stands for the
# name of a method; without it the method is set. Arguments are those of
# benchmark_latency_flops.py; METHODS chooses methods, PYTHON the interpreter.
#
#     tools/analysis/benchmark_all_methods.sh --sizes 512 --batch 8 --out methods.json
set -euo pipefail
here=$(dirname "$0")
config=${CONFIG:-seg/upernet_vim_t_{method\}.py}
. "$here/../_python.sh"
exec "$python" "$here/benchmark_latency_flops.py" "$config" --each-method --paths kernel python \
    ${METHODS:+--methods $METHODS} "$@"
