#!/bin/sh
# First step of every `make` target that installs: says in one sentence what this machine lacks.
#
# Usage: preflight.sh PYTHON CHECK...    CHECK: python | compiler | toolkit | disk
# Exits 1 at the first check that fails.

needed_gib=8 # .venv with torch's CUDA packages takes 5.5 GiB, pip's cache and the build the rest

fail() {
    echo "preflight: $1" >&2
    exit 1
}

check_python() {
    command -v "$python" >/dev/null ||
        fail "no '$python' on the PATH: install Python 3.10 to 3.13, or name one with PYTHON=/path/to/python."
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])') ||
        fail "'$python' does not start."
    case $version in
        3.10 | 3.11 | 3.12 | 3.13) ;;
        *) fail "'$python' is Python $version, but 3.10 to 3.13 is needed: name one with PYTHON=/path/to/python." ;;
    esac
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "'$python' lacks the venv module: install it (Debian and Ubuntu: apt-get install python$version-venv)."
}

check_compiler() {
    compiler=${CXX:-c++}
    command -v "$compiler" >/dev/null ||
        fail "no C++ compiler '$compiler': install one (Debian and Ubuntu: apt-get install g++) or name one with CXX."
    echo '#include <vector>' | "$compiler" -std=c++17 -fsyntax-only -x c++ - 2>/dev/null ||
        fail "'$compiler' does not compile C++17: install a newer one (Debian and Ubuntu: apt-get install g++)."
    include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    [ -f "$include/Python.h" ] ||
        fail "no Python headers ($include/Python.h): install them (Debian and Ubuntu: apt-get install python3-dev)."
}

check_toolkit() {
    PATH="${CUDA_HOME:+$CUDA_HOME/bin:}$PATH" command -v nvcc >/dev/null ||
        fail "no 'nvcc' on the PATH: install the CUDA toolkit that your PyTorch was built with, or name its folder with CUDA_HOME."
}

check_disk() {
    free_kib=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kib" -ge $((needed_gib * 1024 * 1024)) ] ||
        fail "$((free_kib / 1024 / 1024)) GiB of disk are free here, but PyTorch and its CUDA packages need $needed_gib."
}

python=$1
shift
for check in "$@"; do
    case $check in
        python | compiler | toolkit | disk) "check_$check" ;;
        *) fail "unknown check '$check'." ;;
    esac
done
