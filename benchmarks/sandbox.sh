#!/bin/sh
# Becomes a container's process: sandbox.sh ROOT UID READ_ONLY BINDS TMPFS -- COMMAND…
# ROOT is an empty folder; BINDS has a line `mode source target` a mount, TMPFS `target size`.
# Called in the pod's network namespace and in a mount namespace of its own. The image is this
# machine's system, Python and checkout, all read-only.
set -eu
root=$1 uid=$2 read_only=$3 binds=$4 tmpfs=$5
shift 6
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
for name in bin sbin lib lib64 usr; do
    if [ -L "/$name" ]; then
        cp -a "/$name" "$root/$name"
    elif [ -d "/$name" ]; then
        mkdir "$root/$name" && mount --bind -o ro "/$name" "$root/$name"
    fi
done
mkdir "$root/etc" "$root/proc" "$root/dev" "$root/tmp"
for name in passwd group nsswitch.conf ld.so.cache; do cp "/etc/$name" "$root/etc/$name"; done
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o size=64m,mode=1777 tmpfs "$root/dev/shm" # what container runtimes give
while read -r target size; do
    [ -n "$target" ] || continue
    mkdir -p "$root$target" && mount -t tmpfs -o "size=$size,mode=1777" tmpfs "$root$target"
done <<END
$tmpfs
END
while read -r mode source target; do
    [ -n "$mode" ] || continue
    if [ -d "$source" ]; then
        mkdir -p "$root$target"
    else
        touch "$root$target" # /etc/hosts
    fi
    mount --bind "$source" "$root$target"
    [ "$mode" = rw ] || mount -o remount,bind,ro "$root$target"
done <<END
$binds
END
[ "$read_only" = false ] || mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid="$uid" --regid="$uid" --clear-groups --bounding-set=-all \
    --inh-caps=-all --no-new-privs --pdeathsig=KILL env -C /tmp "$@"
