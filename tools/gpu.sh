#!/usr/bin/env bash
# On a machine with a GPU, in less than ten minutes: builds the native module for the Python there,
# runs bench.gpu, then tests/gpu. Each part has a deadline, and what it had found by then is kept.
# Needs no network, no root and no .venv: what is not there, it names.
#
#   tools/gpu.sh [OUT [WORDS...]]     OUT: where the results go (default bench/out/gpu); WORDS go to
#                                     python -m bench.gpu
#
#   PYTHON=python3                    with torch, nanobind, pytest, hypothesis; cmake and ninja, or
#                                     make, come with it or are in PATH
#   MINUTES=9.5                       for all of it
#   STATEHOLD_URING=OFF               build without io_uring
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly python=${PYTHON:-python3} out=${1:-bench/out/gpu}
[ $# -gt 0 ] && shift
mkdir -p "$out"
total=$("$python" -c "print(int(float('${MINUTES:-9.5}') * 60))") || exit 2
PATH=$("$python" -c 'import os, sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
export PATH PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
failed=0

left() { echo $((total - SECONDS)); }

# part NAME SECONDS COMMAND...: its output goes to OUT/NAME.log, and its end to the screen.
part() {
  local name=$1 deadline=$2 status
  shift 2
  [ "$deadline" -gt "$(left)" ] && deadline=$(left)
  if [ "$deadline" -le 0 ]; then
    echo "$name: not run, the time is up"
    failed=1
    return 1
  fi
  timeout --kill-after=10 "$deadline" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ $status = 124 ] || [ $status = 137 ]; then echo "$name: stopped after $deadline s"; fi
  tail -n 5 "$out/$name.log" | sed "s/^/$name: /"
  [ $status = 0 ] || failed=1
  return $status
}

configure_and_build() {
  local generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  cmake -S native -B build/gpu "${generator[@]}" -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$(command -v "$python")" \
    -DSTATEHOLD_INPLACE=ON -DSTATEHOLD_URING="${STATEHOLD_URING:-ON}" &&
    cmake --build build/gpu --parallel &&
    "$python" -c 'from statehold import _core
fs = _core.open_fs()
print("does its I/O with", fs.backend, fs.note)
fs.close()'
}

if [ "${1:-}" = --build ]; then # how this script calls itself, to have a deadline for it
  configure_and_build
  exit
fi
part build 180 "$0" "$out" --build || exit 1
# What the last device has missed comes first, and each figure is in OUT/checks.log as it is found.
# Words choose checks of bench.gpu, and then nothing else is measured.
tests=150 offload=0
[ $# = 0 ] && offload=75
bench=$(($(left) - tests - offload))
part bench "$bench" "$python" -u -m bench.gpu --seconds $((bench - 15)) --out "$out" "$@"
part tests "$tests" "$python" -m pytest -q tests/gpu -p no:cacheprovider
[ $# = 0 ] && part offload "$offload" "$python" -u -m bench.offload --only device --params 1e9 \
  --updates 3 --rounds 1 --out "$out"
exit $failed
