#!/bin/bash
# A GlusterFS that keeps two replicas, and two clients of it.
#
#   glusterfs.sh FOLDER COMMAND...    It runs COMMAND once FOLDER/a and FOLDER/b are the mounts.
#
# It needs namespaces of its own for mounts, processes and networks. All of it ends with them.
set -euo pipefail
folder=$1
shift
mkdir "$folder"/{a,b,place,brick-1,brick-2}
{
  ip link set lo up
  ip addr add 10.99.0.1/32 dev lo # GlusterFS refuses a brick at a loopback address
  for own in /run /var/lib/glusterd /var/log/glusterfs; do mount -t tmpfs tmpfs $own; done
  glusterd --no-daemon --pid-file=/run/glusterd.pid &
  volume() { gluster --mode=script volume "$@"; }
  until volume list; do sleep 0.2; done
  volume create v replica 2 10.99.0.1:"$folder"/brick-{1,2} force
  volume start v
  for client in a b; do
    until mountpoint "$folder/$client"; do
      mount -t glusterfs 10.99.0.1:/v "$folder/$client" || sleep 0.2
    done
  done
} >"$folder/log" 2>&1
"$@"
