#!/usr/bin/env bash
# Builds the native code with sanitizers, and runs what meets them: the C++ tests, then the Python
# tests that drive the module most. `make sanitize` calls it, with .venv;
# STATEHOLD_PYTHON=python takes another interpreter.
#
#   tools/sanitize.sh [address|thread]...     both by default
#
# The interpreter and torch are not instrumented, only the module is: the runtime of the sanitizer
# is loaded before them. What it can then not see is said in native/README.md. The first report ends
# the run; leaks are the business of `make soak`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly root=$PWD python=${STATEHOLD_PYTHON:-$PWD/.venv/bin/python}
PATH=$(dirname "$python"):$PATH  # cmake and ninja

build() {  # build SANITIZER FOLDER
  cmake -S native -B "$2" -G Ninja -DSTATEHOLD_SANITIZE="$1" -DPython_EXECUTABLE="$python" \
    >/dev/null
  cmake --build "$2"
}

# A package like src/statehold, with the modules of this build in place of the everyday ones.
assemble() {  # assemble FOLDER
  local package=$1/python/statehold entry
  rm -rf "$package"
  mkdir -p "$package"
  for entry in src/statehold/*; do
    case $entry in *.so) ;; *) ln -s "$root/$entry" "$package/" ;; esac
  done
  ln -s "$root/$1"/_core.*.so "$root/$1"/_sim.*.so "$package/"
}

runtime() { "${CXX:-g++}" -print-file-name="$1"; }

# The C++ runtime comes along: the sanitizer has to find what throws before torch brings it. Nothing
# is captured: a report would be lost with the process.
tested() {  # tested FOLDER LIBRARY TESTS...
  local folder=$1 library=$2
  shift 2
  env LD_PRELOAD="$(runtime "$library") $(runtime libstdc++.so.6)" PYTHONMALLOC=malloc \
    PYTHONPATH="$root/$folder/python" "$python" -m pytest -q -s ${ARGS:-} "$@"
}

address() {
  export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1
  export UBSAN_OPTIONS=print_stacktrace=1
  build address build/asan
  assemble build/asan
  ctest --test-dir build/asan --output-on-failure --no-tests=error
  # A soak measures memory, of which this runtime keeps much.
  tested build/asan libasan.so tests/conformance tests/checkpointer \
    --ignore=tests/checkpointer/test_soak.py
}

thread() {
  export TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1:suppressions=$root/native/tsan.supp
  TSAN_OPTIONS+=:die_after_fork=0  # forked children of tests start threads
  build thread build/tsan
  assemble build/tsan
  ctest --test-dir build/tsan --output-on-failure --no-tests=error
  tested build/tsan libtsan.so tests/conformance
}

for each in ${*:-address thread}; do "$each"; done
