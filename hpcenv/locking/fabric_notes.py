"""What the locked image lacks for fast networks between nodes, from what the probe has read. Pure.

Runs on: LOGIN NODE.

`hpcenv image lint` says it of an image without a lockfile (rule `no-fabric`), and the verdict of a run for the network
that its nodes really have (judge/network/troubles.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from hpcenv.judge.network.known_bad import KNOWN_BAD, BadVersion, matches
from hpcenv.judge.network.verbs_packages import install_line
from hpcenv.project.lockfile import Lockfile
from hpcenv.records.network import ImageNetwork


def notes(locked: Lockfile, image: ImageNetwork | None) -> tuple[str, ...]:
    """Return what the user should know of the image before jobs of several nodes.

    Args:
        locked: the new lockfile. For an environment of the host there are no notes: its nodes have their own libraries.
        image: what NCCL would use of the image; None where torch has no NCCL.
    """
    if image is None or locked.kind != "sif":
        return ()
    return (*_verbs(locked, image), *_plugins(image), *_known_bad(locked, image))


def _verbs(locked: Lockfile, image: ImageNetwork) -> Iterator[str]:
    if image.verbs and image.providers:
        return
    lacks = "libibverbs.so.1" if not image.verbs else "a provider beside libibverbs.so.1, such as mlx5"
    line = install_line(str(locked.facts.get("system.os-release", "")))
    add = f"add to the Dockerfile: {line}" if line else "install libibverbs and its providers (rdma-core) in the image"
    yield (
        f"the image does not contain {lacks}: with InfiniBand or RoCE, NCCL silently uses TCP between nodes, "
        f"5 to 70 times slower; {add}"
    )


def _plugins(image: ImageNetwork) -> Iterator[str]:
    if image.other_plugins:
        first = f"NCCL takes {image.plugin}" if image.plugin else "the loader finds none of them"
        others = ", ".join(image.other_plugins)
        yield (
            f"the image contains several plugins for NCCL: {first}, not {others}; "
            "add to the Dockerfile: ENV NCCL_NET_PLUGIN=PATH with the right one"
        )
    if image.plugin_version and not image.libfabric:
        yield (
            f"the image contains {image.plugin} (aws-ofi-nccl {image.plugin_version}) and no libfabric.so.1, which it "
            "needs; bind the site's libfabric, or add it to the Dockerfile"
        )


def _known_bad(locked: Lockfile, image: ImageNetwork) -> Iterator[str]:
    versions = {"nccl": str(locked.facts.get("libs.nccl.version", "")), "aws-ofi-nccl": image.plugin_version}
    machine = locked.facts.get("system.machine")
    for entry in KNOWN_BAD:
        version = versions.get(entry.component, "")
        if entry.where == "image" and entry.machine in ("", machine) and matches(entry, version):
            yield _sentence(entry, version)


def _sentence(entry: BadVersion, version: str) -> str:
    name = "NCCL" if entry.component == "nccl" else entry.component
    where = f" on {', '.join(entry.profiles)}" if entry.profiles else ""
    return f"{name} {version} is known to fail{where}: {entry.what}; {entry.hint} ({entry.source}, {entry.date})"
