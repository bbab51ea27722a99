#!/usr/bin/env bash
# Trains the same config with each discretization, and with --seeds with each seed; --help says how.
# Usually started by seg/run_all_methods.sh or det/run_all_methods.sh. PYTHON is the interpreter.
. "$(dirname "$0")/_python.sh"
exec "$python" "$(dirname "$0")/run_all_methods.py" "$@"
