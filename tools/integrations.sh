#!/usr/bin/env bash
# Runs tests/frameworks beside the frameworks that are too heavy for the everyday environment.
# `make integrations` calls it. Arguments go to pytest.
#
# The environment is .venv-integrations, or the folder that INTEGRATIONS_VENV names. It gets what
# tools/requirements-integrations.txt lists, and uses the package in this tree. torchtitan asks for
# older packages, so it has an environment of its own beside that one, by
# tools/requirements-torchtitan.txt.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=${INTEGRATIONS_VENV:-.venv-integrations}
readonly limit_s=600  # of a test: jobs of several ranks import heavy frameworks

# $1: an environment; $2: the file with what it needs
prepare() {
  local python=$1/bin/python wanted=$2 stamp=$1/requirements.stamp sum site
  [ -x "$python" ] || .venv/bin/python -m venv "$1"
  sum=$(cat requirements-dev.txt "$wanted" | cksum)
  if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
    echo "packages   installing $wanted into $1 (minutes)"
    "$python" -m pip install --quiet --disable-pip-version-check --no-input -r "$wanted"
    echo "$sum" >"$stamp"
  fi
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "$PWD/src" >"$site/statehold-tree.pth"
}

failed=0 found=0

# $1: an environment; the rest goes to pytest
run() {
  local code=0
  "$1/bin/python" -m pytest -q -n 2 -o time_limit=$limit_s "${@:2}" || code=$?
  case $code in
    0) found=1 ;;
    5) ;;  # the arguments choose none of these tests
    *) failed=1 ;;
  esac
}

prepare "$venv" tools/requirements-integrations.txt
prepare "$venv-torchtitan" tools/requirements-torchtitan.txt
export STATEHOLD_INTEGRATIONS=1
run "$venv" tests/frameworks tests/docs/test_blocks.py "$@"
run "$venv-torchtitan" tests/frameworks/test_torchtitan.py "$@"
[ $failed = 0 ] && [ $found = 1 ]
