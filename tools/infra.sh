#!/usr/bin/env bash
# Runs tests/infra beside real servers: SLURM, object stores, file systems, containers.
# `make infra` calls it. Arguments go to pytest; --prepare alone runs no test.
#
# What is missing is installed where it may be: the system's packages by root with apt, others in
# .venv-infra, or the folder that INFRA_VENV names (1 GB). Use a machine that may get servers,
# such as a container: apt may start them. STATEHOLD_NO_APT=1 installs no system packages.
# A test whose program is still missing is skipped, with that reason.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly venv=${INFRA_VENV:-.venv-infra} wanted=tools/requirements-infra.txt
readonly stamp=$venv/requirements.stamp
readonly limit_s=900  # of a test, which may start several jobs on a busy machine
readonly system="slurmctld slurmd slurm-client munge bubblewrap python3-seccomp libfaketime
  swift-proxy swift-account swift-container swift-object
  glusterfs-server user-mode-linux nfs-kernel-server nfs-common rpcbind kmod iproute2 procps"

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Status}' "$1" 2>&1)" = installed ]; }

if [ "$(id -u)" = 0 ] && [ -z "${STATEHOLD_NO_APT:-}" ] && command -v apt-get >/dev/null; then
  updated=
  for package in $system; do
    ! is_installed "$package" || continue
    echo "packages   installing $package"
    [ -n "$updated" ] || { apt-get -qq update || true; updated=1; } >/dev/null 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
      -o DPkg::Lock::Timeout=120 "$package" >/dev/null 2>&1 ||
      echo "packages   $package cannot be installed here" >&2
  done
fi

[ -x "$venv/bin/python" ] || .venv/bin/python -m venv "$venv"
sum=$(cksum <"$wanted")
if [ "$(cat "$stamp" 2>/dev/null)" != "$sum" ]; then
  echo "packages   installing $wanted into $venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input -r "$wanted"
  echo "$sum" >"$stamp"
fi

[ "${1:-}" != "--prepare" ] || exit 0
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONHASHSEED=0 STATEHOLD_INFRA=1
# Scripts of the tests run the python that has the package, which is the first one.
export PATH=$PWD/.venv/bin:$(realpath "$venv")/bin:$PATH:/usr/sbin
exec .venv/bin/python -m pytest -q -o time_limit=$limit_s tests/infra "$@"
