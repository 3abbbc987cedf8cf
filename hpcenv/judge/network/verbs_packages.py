"""The line of a Dockerfile that installs libibverbs and its providers. Data and one pure function.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

Sources, read 2026-11-23: Debian 12's package list (libibverbs1, ibverbs-providers); rdma-core 43.4 (0029011). In
redhat/rdma-core.spec, the package `libibverbs` contains the providers. In suse/rdma-core.spec, `libibverbs1` requires
the providers.
"""

from __future__ import annotations

_APT = (
    "RUN apt-get update && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers "
    "&& rm -rf /var/lib/apt/lists/*"
)
_DNF = "RUN dnf install -y libibverbs && dnf clean all"
_ZYPPER = "RUN zypper --non-interactive install libibverbs1 && zypper clean --all"
# ID of /etc/os-release -> line of a Dockerfile.
_LINES = {
    **dict.fromkeys(("debian", "ubuntu"), _APT),
    **dict.fromkeys(("rhel", "rocky", "almalinux", "centos", "fedora", "ol"), _DNF),
    **dict.fromkeys(("sles", "opensuse-leap", "opensuse-tumbleweed"), _ZYPPER),
}


def install_line(os_release: str) -> str:
    """Return the line of a Dockerfile that installs libibverbs and its providers; empty for unknown distributions.

    Args:
        os_release: ID and version of the image's distribution, for example `debian 12`.
    """
    return _LINES.get(os_release.partition(" ")[0], "")
