#!/usr/bin/env bash
# Makes what is released, out of HEAD and nothing else, in dist/: an sdist, wheels, their SHA-256.
# `make release` calls it. All is built twice, in two folders, and has to have the same bytes. Then
# tools/try_wheel.sh tries them on each Python here, with the tutorial where that Python has torch.
#
#   tools/release.sh                  wheels for the Pythons here; they need the C library from here
#   tools/release.sh --manylinux      wheels for any Linux since 2018, by cibuildwheel; needs docker
#
#   PYTHONS="python3.11 python3.13"   instead of every python3.10 to python3.14 in PATH
#
# Its tools are in build/release, as tools/requirements-release.txt says. Uploading is left to you:
# twine upload dist/*.tar.gz dist/*.whl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly root=$PWD work=$PWD/build/release
readonly candidates=${PYTHONS:-python3.10 python3.11 python3.12 python3.13 python3.14}
say() { printf '%-10s %s\n' "$1" "$2"; }
fail() { echo "release failed: $*" >&2; exit 1; }

case "${1:-}" in "" | --manylinux) ;; *) fail "unknown option $1" ;; esac
[ -z "$(git status --porcelain)" ] || fail "there are uncommitted changes: git status"
mkdir -p "$work" dist
commit=$(git rev-parse HEAD)
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct "$commit")
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1 TZ=UTC LC_ALL=C
umask 022

# tools_for PYTHON: prints the interpreter of an environment with what is needed to build.
tools_for() {
  local version env
  version=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  env=$work/python$version
  [ -x "$env/bin/python" ] || "$1" -m venv "$env"
  "$env/bin/python" -m pip install -qq -r tools/requirements-release.txt >&2
  echo "$env/bin/python"
}

# One per kind of wheel: the first Python of 3.12 or later makes the one for all of them.
pythons() {
  local candidate version has_stable=
  for candidate in $candidates; do
    version=$("$candidate" -c 'import sys; print(sys.version_info[1])' 2>/dev/null) || continue
    [ "$version" -lt 12 ] || [ -z "$has_stable" ] || continue
    [ "$version" -lt 12 ] || has_stable=1
    tools_for "$candidate"
  done
}

# made_once FOLDER: an sdist, and wheels that are built from it. The folder of the sources has
# another name each time, so that a path which gets into a file is seen.
made_once() {
  local folder=$1 python
  rm -rf "$folder"
  mkdir -p "$folder/dist" "$folder/built"
  git archive --prefix="of-${folder##*/}/" "$commit" | tar -x -C "$folder"
  "${environments[0]}" -m build --sdist --no-isolation -o "$folder/dist" "$folder/of-${folder##*/}"
  if [ "$option" = --manylinux ]; then
    (cd "$folder/of-${folder##*/}" && "$work/cibuildwheel/bin/cibuildwheel" \
      --platform linux --output-dir "$folder/dist" "$folder"/dist/*.tar.gz)
    return
  fi
  for python in "${environments[@]}"; do
    PATH=${python%/*}:$PATH "$python" -m build --wheel --no-isolation -o "$folder/built" \
      "$folder"/dist/*.tar.gz
  done
  PATH=${environments[0]%/*}:$PATH "${environments[0]}" -m auditwheel repair \
    -w "$folder/dist" "$folder"/built/*.whl
}
option=${1:-}
mapfile -t environments < <(pythons)
[ ${#environments[@]} -gt 0 ] || fail "no Python of at least 3.10; set PYTHONS"
if [ "$option" = --manylinux ]; then
  [ -d "$work/cibuildwheel" ] || "${environments[0]}" -m venv "$work/cibuildwheel"
  "$work/cibuildwheel/bin/python" -m pip install -qq cibuildwheel==4.2.1
fi
for each in first second; do
  say "$each" "building; the log is build/release/$each.log"
  # In the background, because bash does not stop at errors in a function that || follows.
  made_once "$work/$each" >"$work/$each.log" 2>&1 &
  wait $! || { tail -n 25 "$work/$each.log" >&2; fail "see build/release/$each.log"; }
done
diff -r "$work/first/dist" "$work/second/dist" >&2 || fail "the two builds differ"
say same "both builds have the same bytes"

"${environments[0]}" -m twine check --strict "$work"/first/dist/*
rm -f dist/*
cp "$work"/first/dist/* dist/
(cd dist && sha256sum -- *.tar.gz *.whl >SHA256SUMS)
cat dist/SHA256SUMS

# The stable wheel is tried on each Python that may install it.
for candidate in $candidates; do
  "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
  say try "the wheel for $("$candidate" --version), alone"
  PYTHON=$candidate tools/try_wheel.sh dist
done
