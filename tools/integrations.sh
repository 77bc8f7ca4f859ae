#!/usr/bin/env bash
# Runs tests/frameworks beside the frameworks that are too heavy for the everyday environment.
# `make integrations` calls it. Arguments go to pytest.
#
# The environment is .venv-integrations, or the folder that INTEGRATIONS_VENV names. It gets what
# tools/requirements-integrations.txt lists, and uses the package in this tree.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly wanted=tools/requirements-integrations.txt
readonly venv=${INTEGRATIONS_VENV:-.venv-integrations}
readonly python=$venv/bin/python stamp=$venv/requirements.stamp

[ -x "$python" ] || .venv/bin/python -m venv "$venv"
sum=$(cat requirements-dev.txt "$wanted" | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
  echo "packages   installing $wanted into $venv (minutes)"
  "$python" -m pip install --quiet --disable-pip-version-check --no-input -r "$wanted"
  echo "$sum" >"$stamp"
fi
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/src" >"$site/statehold-tree.pth"

STATEHOLD_INTEGRATIONS=1 "$python" -m pytest -q -n 2 tests/frameworks "$@"
