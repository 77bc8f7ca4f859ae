#!/usr/bin/env bash
# Installs the wheel that fits into an empty environment, where no compiler is, and runs the demo
# with it, in a folder that has nothing of the tree but the examples.
#
#   tools/try_wheel.sh FOLDER [WORDS...]    the folder of wheels; WORDS go to examples/llama/demo.py
#
#   PYTHON=.venv/bin/python                 has torch; its packages are lent to the environment
set -euo pipefail

if [ "${1:-}" != --hidden ]; then
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  wheels=$(realpath "$1")
  shift
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  cp -r examples "$folder/"
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
# What is lent by PYTHONPATH has no .pth files, so the tree in src/ stays out of sight.
export PYTHONPATH=$lent
env/bin/python -c 'import statehold, sys; sys.exit(not statehold.__file__.startswith(sys.prefix))'
env/bin/python examples/llama/demo.py "$@"
