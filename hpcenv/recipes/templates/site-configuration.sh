set -eu
umask 022
export DEBIAN_FRONTEND=noninteractive
# The site's configuration, if any, is mounted while this runs; the image does not contain it.
if [ -e /mnt/apt.conf ]; then export APT_CONFIG="/mnt/apt.conf"; fi
if [ -e /mnt/pip.conf ]; then export PIP_CONFIG_FILE="/mnt/pip.conf"; fi
# An unprivileged build may have only one user, so apt cannot change to another user.
apt="apt-get --yes -o APT::Sandbox::User=root -o Dpkg::Use-Pty=0"
if [ -e /mnt/apt.sources ]; then
    apt="$apt -o Dir::Etc::SourceList=/mnt/apt.sources -o Dir::Etc::SourceParts=/dev/null"
fi
if [ -e /mnt/ca.crt ]; then
    apt="$apt -o Acquire::https::CAInfo=/mnt/ca.crt"
    export PIP_CERT="/mnt/ca.crt"
fi
