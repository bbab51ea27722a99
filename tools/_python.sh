# Sourced: `python` becomes the interpreter, PYTHON or that of the active environment.
python=${PYTHON:-python}
if ! command -v "$python" > /dev/null; then
    echo "$(basename "$0"): error: there is no $python; activate the environment (. .venv/bin/activate) or set PYTHON" >&2
    exit 1
fi
