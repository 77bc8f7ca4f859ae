#!/usr/bin/env bash
# Builds the native code for arm64 with all warnings as errors, and runs its C++ tests in an
# emulator. Prints what they skip. `make arm` calls it.
#
#   QEMU=qemu-aarch64         the emulator; by default the first that is installed
#   CXX=aarch64-linux-gnu-g++ the compiler
#
# On Debian: apt install g++-aarch64-linux-gnu qemu-user. The emulator has no io_uring, so threads
# do the I/O. Its pages have 4 KiB (test/large_pages_test.cpp is for others), and on an x86 host it
# does not reorder loads and stores as arm64 does.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly folder=build/aarch64 compiler=${CXX:-aarch64-linux-gnu-g++}
PATH=$PWD/.venv/bin:$PATH  # cmake and ninja
qemu=${QEMU:-$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)}
for each in "$compiler" "${qemu:-qemu-aarch64}"; do
  command -v "$each" >/dev/null || { echo "aarch64: $each is not installed" >&2; exit 2; }
done
libraries=$(dirname "$(dirname "$(realpath "$("$compiler" -print-file-name=libc.so.6)")")")

cmake -S native -B "$folder" -G Ninja -DSTATEHOLD_TESTS=ON -DSTATEHOLD_MODULE=OFF \
  -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER="$compiler" \
  -DCMAKE_CXX_FLAGS="-Werror ${CXXFLAGS:-}" \
  -DCMAKE_CROSSCOMPILING_EMULATOR="$qemu;-L;$libraries" >/dev/null
cmake --build "$folder"

ctest --test-dir "$folder" --no-tests=error --output-on-failure --output-log "$folder/ctest.log" \
  --verbose >/dev/null || failed=1
grep -E '^[0-9]+: (skip|FAIL)|tests (passed|failed)|\*\*\*' "$folder/ctest.log"
exit ${failed:-0}
