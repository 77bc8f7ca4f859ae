#!/usr/bin/env bash
# Runs a command on a machine that seems to have no compiler, no liburing and no xxHash: in a mount
# namespace of its own, an empty file lies over each of them. Nothing outside of it changes.
#
#   tools/without_compiler.sh COMMAND...
#
# It proves what it claims before it runs the command, and ends with 99 where it cannot hide them.
set -euo pipefail

unable() { echo "without_compiler: $*" >&2; exit 99; }

if [ "${1:-}" != --inside ]; then
  command -v unshare >/dev/null || unable "needs unshare (util-linux)"
  namespace=(unshare --mount)
  [ "$(id -u)" = 0 ] || namespace+=(--map-root-user)
  "${namespace[@]}" true 2>/dev/null || unable "the kernel refuses a mount namespace"
  exec "${namespace[@]}" "$0" --inside "$@"
fi
shift

programs() {
  tr : '\n' <<<"$PATH:/usr/bin:/usr/local/bin" | sort -u | while read -r folder; do
    [ ! -d "$folder" ] || find "$folder/" -maxdepth 1 -regextype posix-extended \
      -regex '.*/([^/]*-)?(cc|c\+\+|gcc|g\+\+|clang|clang\+\+)(-[0-9.]+)?'
  done
}

libraries() {
  find /lib/ /lib64/ /usr/lib/ /usr/local/lib/ /usr/include/ /usr/local/include/ \
    \( -name 'liburing*' -o -name 'libxxhash*' -o -name 'xxhash.h' \) 2>/dev/null || true
}

{ programs; libraries; } | xargs -r realpath -q | sort -u | while read -r file; do
  [ ! -f "$file" ] || mount --bind /dev/null "$file"
done

for compiler in "${CXX:-c++}" cc c++ gcc g++ clang++; do
  ! "$compiler" --version >/dev/null 2>&1 || unable "$compiler still runs"
done
for library in liburing.so.2 liburing.so libxxhash.so.0; do
  ! python3 -c "import ctypes; ctypes.CDLL('$library')" 2>/dev/null || unable "$library still loads"
done
exec "$@"
