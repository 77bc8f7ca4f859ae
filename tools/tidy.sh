#!/usr/bin/env bash
# clang-tidy over the native code, with the checks of .clang-tidy: bugs, and accesses without their
# mutex. `make check` calls it. It takes three minutes of processor time.
#
#   tools/tidy.sh [WORDS...]          all of native/*.cpp, or the files whose path matches a word
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly bin=$PWD/.venv/bin folder=build/tidy
[ $# -gt 0 ] || set -- '/native/[^/]*\.cpp$'

PATH=$bin:$PATH
cmake -S native -B "$folder" -G Ninja -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -DSTATEHOLD_SIM=ON \
  -DPython_EXECUTABLE="$bin/python" >/dev/null
"$bin/python" "$bin/run-clang-tidy.py" -quiet -p "$folder" -clang-tidy-binary "$bin/clang-tidy" "$@"
