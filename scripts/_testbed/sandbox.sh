#!/bin/bash
# Runs a command inside an overlay over a root; called by rootfs.sandbox_argv, inside its own
# mount, pid and network namespace, so nothing here needs undoing.
# Arguments: ROOT UPPER NBINDS (SOURCE TARGET)... COMMAND...
set -euo pipefail
root=$1 upper=$2 nbinds=$3
shift 3
ip link set lo up
mkdir -p "$upper" "$upper.work" "$upper.view"
mount -t overlay overlay -o "lowerdir=$root,upperdir=$upper,workdir=$upper.work" "$upper.view"
for ((i = 0; i < nbinds; i++)); do
    mkdir -p "$upper.view$2"
    mount --bind "$1" "$upper.view$2"
    shift 2
done
mount -t proc proc "$upper.view/proc"
mount -t tmpfs -o mode=1777 tmp "$upper.view/tmp"
# Device files: pip and Python want null and urandom; the root's own /dev may be empty.
mount -t tmpfs -o mode=755 dev "$upper.view/dev"
for device in null zero full random urandom; do
    touch "$upper.view/dev/$device"
    mount --bind "/dev/$device" "$upper.view/dev/$device"
done
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
    PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_NO_INDEX=1 \
    chroot "$upper.view" "$@"
