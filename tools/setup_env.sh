#!/usr/bin/env bash
# Prepares a checkout: system packages, .venv, Python packages, the native module in src/statehold.
# Idempotent: what is already there is kept, and a second run takes seconds. One line per stage; the
# rest goes to build/setup.log. `make setup`, `make demo` and `make test` call it.
#
#   tools/setup_env.sh [--tests]      --tests builds the C++ unit tests too
#
#   PYTHON=python3.12                 the interpreter for a new .venv (default: python3)
#   STATEHOLD_NO_APT=1                never install system packages
#   STATEHOLD_URING=OFF               build without io_uring
#   CXX=clang++                       the compiler
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly root=$PWD log=$PWD/build/setup.log venv=$PWD/.venv
with_tests=OFF
case "${1:-}" in
  "") ;;
  --tests) with_tests=ON ;;
  *) echo "usage: tools/setup_env.sh [--tests]" >&2; exit 2 ;;
esac

mkdir -p build
exec 9>build/setup.lock
if command -v flock >/dev/null; then flock 9; fi  # two `make` at once would build over each other
: >"$log"

say() { printf '%-10s %s\n' "$1" "$2"; }

fail() {  # fail STAGE WHAT-TO-DO
  {
    echo "setup failed: $1"
    if [ -s "$log" ]; then
      echo "--- the end of build/setup.log"
      tail -n 25 "$log"
      echo "---"
    fi
    echo "$2"
  } >&2
  exit 1
}

logged() {
  echo "+ $*" >>"$log"
  "$@" >>"$log" 2>&1 9>&-
}

# --- Python -------------------------------------------------------------------------------------

recent_enough() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >>"$log" 2>&1
}

venv_works() {
  [ -x "$venv/bin/python" ] && recent_enough "$venv/bin/python" &&
    logged "$venv/bin/python" -m pip --version
}

find_python() {
  local candidate
  if venv_works; then
    python=$venv/bin/python
    return
  fi
  if [ -n "${PYTHON:-}" ]; then
    recent_enough "$PYTHON" || fail "PYTHON=$PYTHON does not run, or is older than 3.10" \
      "Set PYTHON to a Python of at least 3.10."
    python=$PYTHON
    return
  fi
  for candidate in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do
    if command -v "$candidate" >/dev/null && recent_enough "$candidate"; then
      python=$candidate
      return
    fi
  done
  fail "no Python of at least 3.10 found" "Install one, or set PYTHON to its path."
}

# --- System packages ----------------------------------------------------------------------------

has_compiler() { command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null; }
has_python_headers() {
  "$1" -c 'import os, sysconfig
raise SystemExit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}

missing_packages() {
  local version
  version=$("$python" -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
  has_compiler || echo g++
  has_python_headers "$python" || echo "$version-dev"
  "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "$version-venv"
}

# Prints the command that may run apt-get, or fails when nobody here may.
apt_prefix() {
  [ -z "${STATEHOLD_NO_APT:-}" ] && command -v apt-get >/dev/null || return 1
  if [ "$(id -u)" = 0 ]; then
    echo env
  elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
    echo sudo -n env
  else
    return 1
  fi
}

# Best effort: only a missing compiler stops the setup, and the build says so better than apt does.
# What could not be installed is remembered, so that a machine without network waits for apt once.
install_packages() {
  local missing prefix package tried=build/setup.apt-tried
  missing=$(missing_packages | tr '\n' ' ')
  if [ -z "$missing" ]; then
    say system "compiler and headers are there"
    return
  fi
  if ! prefix=$(apt_prefix); then
    say system "not there, and not mine to install: $missing"
    return
  fi
  if [ "$(cat "$tried" 2>/dev/null)" = "$missing" ]; then
    say system "not there, and apt-get could not install: $missing"
    return
  fi
  say system "installing $missing"
  # shellcheck disable=SC2086  # the prefix is several words
  logged $prefix DEBIAN_FRONTEND=noninteractive apt-get update || true
  for package in $missing; do
    # shellcheck disable=SC2086
    logged $prefix DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      -o DPkg::Lock::Timeout=120 "$package" || true
  done
  missing_packages | tr '\n' ' ' >"$tried"
}

# --- The stages ---------------------------------------------------------------------------------

make_venv() {
  if venv_works; then
    say venv ".venv is there ($("$venv/bin/python" --version))"
    return
  fi
  say venv "creating .venv with $("$python" --version)"
  logged "$python" -m venv --clear "$venv" && venv_works || fail "could not create .venv" \
    "Install the venv module of $python (on Debian and Ubuntu: apt install python3-venv)."
}

install_requirements() {
  local wanted stamp=$venv/requirements.stamp
  wanted=$(cksum <requirements-dev.txt)
  if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
    say packages "as requirements-dev.txt says"
  else
    say packages "installing requirements-dev.txt (PyTorch among them: minutes)"
    logged "$venv/bin/python" -m pip install --disable-pip-version-check --no-input \
      -r requirements-dev.txt || fail "could not install requirements-dev.txt" \
      "Check the network or the pip configuration (pip config list), then run it again."
    echo "$wanted" >"$stamp"
  fi
  # The tests and the demo use the code of this tree, not an installed copy of it.
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$root/src" >"$site/statehold-tree.pth"
  # So is the command: .venv/bin/statehold.
  printf '#!%s\nimport sys\n\nfrom statehold.cli import main\n\nsys.exit(main())\n' \
    "$venv/bin/python" >"$venv/bin/statehold"
  chmod +x "$venv/bin/statehold"
}

build_native() {
  local jobs backend
  logged cmake -S native -B build/dev -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DPython_EXECUTABLE="$venv/bin/python" -DSTATEHOLD_INPLACE=ON \
    -DSTATEHOLD_TESTS=$with_tests -DSTATEHOLD_URING="${STATEHOLD_URING:-ON}" ||
    fail "could not configure the native module" \
      "It needs a C++20 compiler (g++ 10 or clang 12, or later) and the headers of Python."
  logged cmake --build build/dev ||
    fail "could not build the native module" "The whole log is build/setup.log."
  backend=$("$venv/bin/python" -c '
from statehold import _core
fs = _core.open_fs()
print(fs.backend + (": " + fs.note if fs.note else ""))' 2>>"$log") ||
    fail "the native module does not load" "Try again after make clean."
  say native "built, does its I/O with $backend"
}

find_python
install_packages
make_venv
export PATH=$venv/bin:$PATH  # cmake and ninja
install_requirements
build_native
