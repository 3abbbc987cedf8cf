#!/bin/bash
# The first process of a machine: makes its view of the file system, then becomes tini.
# Called by machine.start in new mount, uts, pid, ipc and network namespaces.
# Arguments: NAME ROLE ROOT OWN ETC GPUS MARK CGROUP GROUP (MODE SOURCE TARGET)...
# CGROUP is `none`, `empty` (a place for a slurmd that only wants to see one), or controllers of
# cgroup v1; then GROUP are the machine's own groups in the host's hierarchies. Both with commas.
set -euo pipefail
if [ "$9" != none ] && [ -z "${IN_OWN_GROUP:-}" ]; then
    # Twice through here: a cgroup namespace has as its root the group that its maker was in.
    for group in ${9//,/ }; do
        mkdir -p "$group"
        echo $$ >"$group/cgroup.procs"
    done
    IN_OWN_GROUP=1 exec unshare --cgroup -- bash "$0" "$@"
fi
name=$1 role=$2 root=$3 own=$4 etc=$5 gpus=$6 mark=$7 cgroup=$8
shift 9
view=$own/view
mkdir -p "$own/upper" "$own/work" "$view"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$own/upper,workdir=$own/work" "$view"

mount -t proc -o nosuid,nodev,noexec proc "$view/proc"
mount -t sysfs -o nosuid,nodev,noexec sys "$view/sys"
if [ "$cgroup" != none ]; then
    mount -t tmpfs -o mode=755,nosuid,nodev,noexec cgroup "$view/sys/fs/cgroup"
    if [ "$cgroup" != empty ]; then
        for controller in ${cgroup//,/ }; do
            mkdir "$view/sys/fs/cgroup/$controller"
            mount -t cgroup -o "$controller" "$controller" "$view/sys/fs/cgroup/$controller"
        done
    fi
fi
mount -t tmpfs -o mode=1777,nosuid,nodev tmp "$view/tmp"
mount -t tmpfs -o mode=755,nosuid,nodev run "$view/run"

# Own device files: the host's /dev/fuse may be mode 0600, and is not ours to change.
mount -t tmpfs -o mode=755,nosuid dev "$view/dev"
device() { mknod -m 666 "$view/dev/$1" c "$2" "$3"; }
device null 1 3; device zero 1 5; device full 1 7; device random 1 8; device urandom 1 9; device tty 5 0
device fuse 10 229
# GPUs are device files, or slurmd drops them ("Ignoring file-less GPU") and the node is INVALID_REG.
for ((i = 0; i < gpus; i++)); do device "fakegpu$i" 1 3; done
# The stand-in for the driver's library (stub_nvml.c). hpcenv looks for it where the driver's device file is.
if ((gpus > 0)) && [ -e "$etc/nvml/libnvidia-ml.so.1" ]; then
    device nvidiactl 1 3
    cp "$etc/nvml/libnvidia-ml.so.1" "$view/usr/lib/$(uname -m)-linux-gnu/"
    cp "$etc/nvml/$name.conf" "$view/etc/stub-nvml.conf"
fi
mkdir "$view/dev/pts" "$view/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$view/dev/pts"
mount -t tmpfs -o mode=1777,nosuid,nodev shm "$view/dev/shm"
ln -s pts/ptmx "$view/dev/ptmx"
ln -s /proc/self/fd "$view/dev/fd"
ln -s /proc/self/fd/0 "$view/dev/stdin"
ln -s /proc/self/fd/1 "$view/dev/stdout"
ln -s /proc/self/fd/2 "$view/dev/stderr"

while [ $# -gt 0 ]; do
    mkdir -p "$view$3"
    case $1 in
    rw) mount --bind "$2" "$view$3" ;;
    ro) mount --bind "$2" "$view$3"; mount -o remount,bind,ro "$view$3" ;;
    overlay)
        mkdir -p "$own/data" "$own/data.work"
        mount -t overlay overlay -o "lowerdir=$2,upperdir=$own/data,workdir=$own/data.work" "$view$3" ;;
    esac
    shift 3
done

hostname "$name"
# ping as a user, without a capability on the file.
echo "0 2147483647" >/proc/sys/net/ipv4/ping_group_range
echo "$name" >"$view/etc/hostname"
cp "$etc/hosts" "$view/etc/hosts"
: >"$view/etc/resolv.conf"
cp "$etc/munge.key" "$view/etc/munge/munge.key"
cp "$etc/registry.yml" "$view/etc/registry.yml"

# pivot_root, not chroot: Apptainer refuses to run in a "weak chrooted environment".
cd "$view"
mkdir -p .old
pivot_root . .old
cd /
umount -l /.old
rmdir /.old

# From here on names of users are this root's own.
directory() { install -d -o "$1" -g "$1" -m 755 "$2"; }
chown munge:munge /etc/munge/munge.key
chmod 400 /etc/munge/munge.key
directory munge /run/munge
directory slurm /run/slurm
directory slurm /var/log/slurm
mkdir -p /var/lib/slurm/slurmd
if [ "$role" = ctl ]; then
    directory mysql /run/mysqld
    directory mysql /run/mariadbd # where newer packages of MariaDB have socket and pid file
    directory slurm /var/lib/slurm/slurmctld
fi
# tini reaps orphans: slurmd's job steps leave many. The mark is how `down` finds the machine.
exec env -i "_HPCENV_TESTBED_MARK=$mark" PATH=/usr/sbin:/usr/bin:/sbin:/bin tini -- sleep infinity
