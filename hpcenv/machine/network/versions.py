"""Versions of the host's network software: kernel modules, libfabric, verbs, plugins.

Runs on: COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcenv.machine.tree import HostTree
from hpcenv.records.network import FabricVersion

_MODULES = {
    "mlx5_core": "mlx5_core",
    "efa": "efa",
    "nvidia-driver": "nvidia",
    "amdgpu": "amdgpu",
    "gdrdrv": "gdrdrv",
    "cxi_ss1": "cxi_ss1",
    "gve": "gve",
}

# Folders in which sites and vendors install software. In each folder, the subfolders of `_LIBS` are searched.
_PREFIXES = ("/usr", "/usr/local", "/opt/amazon/efa", "/opt/cray/libfabric/default", "/opt/mellanox")
_LIBS = ("lib64", "lib", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
_PACKAGES = {"libfabric": "libfabric", "libibverbs": "libibverbs", "libcxi": "libcxi"}

_PLUGIN_FOLDERS = (
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
    "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "/opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "/opt/amazon/aws-ofi-nccl/lib",
    "/opt/aws-ofi-nccl/lib",
    "/opt/aws-ofi-nccl/install/lib",
    "/usr/local/gib/lib64",
    "/var/lib/tcpxo/lib64",
    "/opt/hpcx/nccl_rdma_sharp_plugin/lib",
)
# The file of a plugin has a few MB. It contains the text that the plugin prints at its start, such as
# `aws-ofi-nccl 1.18.0`.
_PLUGIN_BYTES = 16 * 1024 * 1024
_OFI = re.compile(rb"aws-ofi-n?r?ccl (\d+\.\d+\.\d+[\w.-]*)")


def read_versions(tree: HostTree) -> tuple[FabricVersion, ...]:
    """Return the versions that could be read, sorted by name. A component that is not installed has no entry."""
    found = [*_modules(tree), *_packages(tree), *_cray(tree), *_others(tree), *_plugins(tree)]
    return tuple(sorted(set(found), key=lambda version: (version.name, version.path)))


def _modules(tree: HostTree) -> Iterator[FabricVersion]:
    for name, module in _MODULES.items():
        path = f"/sys/module/{module}/version"
        if version := tree.text(path):
            yield FabricVersion(name=name, version=version[:80], path=path)


def _packages(tree: HostTree) -> Iterator[FabricVersion]:
    for prefix in _PREFIXES:
        for lib in _LIBS:
            for name, package in _PACKAGES.items():
                path = f"{prefix}/{lib}/pkgconfig/{package}.pc"
                match = re.search(r"^Version:\s*(\S+)", tree.text(path), re.MULTILINE)
                if match:
                    yield FabricVersion(name=name, version=match.group(1), path=path)


def _cray(tree: HostTree) -> Iterator[FabricVersion]:
    """Yield the versions of HPE's libfabric and of HPE's driver. A folder of this libfabric has its version as name."""
    for name in tree.names("/opt/cray/libfabric"):
        if re.match(r"\d", name):
            yield FabricVersion(name="libfabric", version=name, path=f"/opt/cray/libfabric/{name}")
    for device in tree.names("/sys/class/cxi")[:1]:
        path = f"/sys/class/cxi/{device}/device/properties/driver_rev"
        if version := tree.text(path):
            yield FabricVersion(name="cxi-driver", version=version[:80], path=path)


def _others(tree: HostTree) -> Iterator[FabricVersion]:
    installer = re.search(r"EFA installer version: (\S+)", tree.text("/opt/amazon/efa_installed_packages"))
    if installer:
        path = "/opt/amazon/efa_installed_packages"
        yield FabricVersion(name="efa-installer", version=installer.group(1), path=path)
    # Monitors of libfabric's cache of registered memory: a device, and a switch of the kernel.
    if tree.exists("/dev/kdreg2"):
        yield FabricVersion(name="kdreg2", version="present", path="/dev/kdreg2")
    allowed = tree.text("/proc/sys/vm/unprivileged_userfaultfd")
    if allowed:
        path = "/proc/sys/vm/unprivileged_userfaultfd"
        yield FabricVersion(name="userfaultfd", version="all users" if allowed == "1" else "privileged", path=path)


def _plugins(tree: HostTree) -> Iterator[FabricVersion]:
    for folder in _PLUGIN_FOLDERS:
        for name in tree.names(folder):
            if not re.fullmatch(r"lib[nr]ccl-net(-[\w-]+)?\.so", name):
                continue
            path = f"{folder}/{name}"
            match = tree.search(path, _OFI, most=_PLUGIN_BYTES)
            if match:
                yield FabricVersion(name="aws-ofi-nccl", version=match.group(1).decode("ascii", "replace"), path=path)
            else:
                yield FabricVersion(name="nccl-net-plugin", version="unknown", path=path)
