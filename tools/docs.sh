#!/usr/bin/env bash
# Builds the site into build/site, in an environment of its own, .venv-docs. `make docs` calls it.
# A link that leads nowhere, a page that no menu has, and a name without a docstring are errors.
#
#   tools/docs.sh [serve]      serve: at http://127.0.0.1:8000, built again after each change
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly env=$PWD/.venv-docs
wanted=$(cksum <tools/requirements-docs.txt)
if [ "$(cat "$env/requirements.stamp" 2>/dev/null)" != "$wanted" ]; then
  python3 -m venv "$env"
  "$env/bin/python" -m pip install -qq --disable-pip-version-check -r tools/requirements-docs.txt
  echo "$wanted" >"$env/requirements.stamp"
fi
PATH=$env/bin:$PATH # ruff, which formats signatures
if [ "${1:-}" = serve ]; then
  exec "$env/bin/mkdocs" serve
fi
"$env/bin/mkdocs" build --quiet
echo "build/site/index.html"
