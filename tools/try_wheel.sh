#!/usr/bin/env bash
# Installs the wheel that fits into an empty environment, where no compiler is, in a folder that has
# nothing of the tree but documents, examples and an old step. Verifies the step, and runs the
# tutorial and the demo.
#
#   tools/try_wheel.sh FOLDER [WORDS...]    the folder of wheels; with WORDS, which go to
#                                           examples/llama/demo.py, only the demo
#
#   PYTHON=.venv/bin/python                 its packages are lent to the environment; without torch
#                                           among them, neither tutorial nor demo runs
set -euo pipefail

if [ "${1:-}" != --hidden ]; then
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  wheels=$(realpath "$1")
  shift
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  mkdir -p "$folder"/tests
  cp -r examples tools docs "$folder/"
  cp -r tests/support tests/golden "$folder/tests/"
  tools/without_compiler.sh "$PWD/tools/try_wheel.sh" --hidden "$folder" \
    "${PYTHON:-$PWD/.venv/bin/python}" "$wheels" "$@"
  exit
fi

cd "$2"
readonly python=$3 wheels=$4
shift 4
lent=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -m venv --without-pip env
"$python" -m pip --python env/bin/python --disable-pip-version-check --no-input install --quiet \
  --no-index --find-links "$wheels" --pre --only-binary :all: --no-deps statehold
env -u PYTHONPATH env/bin/statehold doctor
env -u PYTHONPATH env/bin/statehold verify tests/golden/v4
# What is lent by PYTHONPATH has no .pth files, so the tree in src/ stays out of sight.
export PYTHONPATH=$lent
env/bin/python -c 'import statehold, sys; sys.exit(not statehold.__file__.startswith(sys.prefix))'
env/bin/python -c 'import torch' 2>/dev/null ||
  { echo "try_wheel: $python has no torch, so neither tutorial nor demo runs"; exit; }
[ $# -gt 0 ] || env/bin/python tools/tutorial.py
env/bin/python examples/llama/demo.py "$@"
