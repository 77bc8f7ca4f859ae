#!/bin/bash
# The NFS server of a kernel, and two clients of it, in a virtual machine of User Mode Linux.
#
#   nfs.sh FOLDER OPTIONS COMMAND...    It runs COMMAND there, once FOLDER/a and FOLDER/b are mounts
#                                       with these OPTIONS, such as vers=3,noac.
#
# The machine sees the files of this one, so the same interpreter runs there. Its disk is a file.
# Its first process is this script without a COMMAND. What COMMAND prints is printed at the end.
set -euo pipefail
folder=$1 options=$2
shift 2

if [ $# -gt 0 ]; then
  mkdir "$folder"/{a,b,place,modules}
  { export -p && printf '%q ' "$@"; } >"$folder/command"
  printf '#!/bin/bash\nexec %q %q %q\n' "$(realpath "$0")" "$folder" "$options" >"$folder/init"
  chmod +x "$folder/init"
  truncate -s 512M "$folder/disk"
  mkfs.ext4 -q "$folder/disk"
  ${CC:-cc} -O1 -shared -fPIC -o "$folder/registers.so" "$(dirname "$0")/registers.c"
  LD_PRELOAD="$folder/registers.so" linux.uml mem=1024M rootfstype=hostfs rw quiet \
    "ubdb=$folder/disk" "init=$folder/init" con0=null,fd:1 con=null >"$folder/console" 2>&1 || true
  cat "$folder/printed"
  exit
fi

serve() {
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys
  mkdir -p /dev/shm
  for own in /run /dev/shm /mnt /var/lib/nfs; do mount -t tmpfs tmpfs $own; done
  mkdir -p "$folder/modules/lib" /mnt/x /var/lib/nfs/{sm,sm.bak,v4recovery,rpc_pipefs} /run/rpcbind
  ln -s /usr/lib/uml/modules "$folder/modules/lib/modules"
  modprobe -d "$folder/modules" -a nfs nfsv3 nfsv4 nfsd lockd
  mount /dev/ubdb /mnt/x
  ip link set lo up
  mount -t nfsd nfsd /proc/fs/nfsd
  rpcbind -w
  echo 1 >/proc/sys/fs/nfs/nlm_grace_period # or the first lock waits for a minute
  touch /var/lib/nfs/{etab,rmtab,xtab}
  exportfs -o rw,no_root_squash,sync,no_subtree_check,fsid=0 127.0.0.1:/mnt/x
  rpc.nfsd -V 4.2 4
  echo Y >/proc/fs/nfsd/v4_end_grace
  rpc.mountd
  rpc.statd --no-notify
  case $options in *vers=4*) exported=/ ;; *) exported=/mnt/x ;; esac
  # Each mount has caches of its own, as on hosts of their own.
  for client in a b; do
    mount -t nfs -o "$options,nosharecache" "127.0.0.1:$exported" "$folder/$client"
  done
}

trap 'sync; echo o >/proc/sysrq-trigger; while :; do sleep 1; done' EXIT # power off
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
exec >"$folder/log" 2>&1
serve
bash "$folder/command" >"$folder/printed"
