"""Lockfiles for the tests of exports."""

from __future__ import annotations

from typing import Any

from hpcenv.project import lockfile
from hpcenv.project.document import parse
from hpcenv.project.lockfile import Lockfile

A, B, C = "a" * 64, "b" * 64, "c" * 64


def dist(
    name: str, version: str = "1.0", *, sha256: str | None = A, proof: str = "record", **rest: Any
) -> dict[str, Any]:
    wheel = {"proof": proof, "filename": f"{name}-{version}-py3-none-any.whl", "index": "pypi"}
    if sha256 is not None:
        wheel["sha256"] = sha256
    return {"name": name, "version": version, "source": "wheel", "record-sha256": "01", "wheel": wheel, **rest}


VCS = {
    "source": "vcs",
    "direct-url": {"url": "https://git.example/x.git", "commit-id": "4f2a"},
    "wheel": {"proof": "none"},
}


EDITABLE = {
    "source": "editable",
    "direct-url": {"url": "file:mine", "commit-id": "77aa", "dirty": True, "editable": True},
}


DISTS = [
    dist("torch", "2.13.0+cu130", sha256=B),
    dist("numpy", "2.3"),
    dist("Mine", **EDITABLE, wheel={"proof": "none", "reason": "installed from a directory"}),
    dist("pulled", **VCS),
    dist("unproved", sha256=C, proof="none"),
    {"name": "unasked", "version": "3", "source": "wheel"},
]


IMAGE = {
    "reference": "docker://registry.example:5000/team/torch:2.13",
    "index-digest": f"sha256:{A}",
    "manifest-digest": f"sha256:{B}",
    "config-digest": f"sha256:{C}",
    "rootfs-chain-id": f"sha256:{A}",
    "platform": "linux/amd64",
    "env-digest": f"sha256:{C}",
    "nvidia": {"CUDA_VERSION": "13.0.0"},
    "layers": [{"digest": f"sha256:{A}", "diff-id": f"sha256:{B}", "size": 1, "media-type": "x"}],
    "sif": {
        "sha256": C, "size": 1, "partition-sha256": A, "partition-size": 1, "compression": "zstd", "arch": "amd64",
        "built-with": "apptainer 1.5", "builder": "b", "mksquashfs-args": ["-x"], "source-date-epoch": 0,
    },
}  # fmt: skip


def locked(
    *dists: dict[str, Any], facts: dict[str, Any] | None = None, image: bool = False, edited: bool = False
) -> Lockfile:
    data: dict[str, Any] = {
        "schema": 1,
        "generated-by": "hpcenv 0.1.0",
        "fingerprint": "hpc1-000000000000",
        "kind": "sif" if image else "host",
        "asked": {"image": IMAGE["reference"] if image else "host", "platform": "linux/amd64"},
        **({"container": IMAGE} if image else {}),
        "python": {"version": "3.12.11", "implementation": "cpython"},
        "torch": {"version": "2.13.0", "cuda": "13.0"},
        "libs": {
            "nccl": {"version": "2.29.7", "sha256": f"sha256:{C}", "origin": "wheel"},
            "cudnn": {"version": "absent", "sha256": "absent"},
        },
        "system": {"machine": "x86_64", "glibc": "2.36"},
        "unknown": {"libs.cudnn.version": "cannot be read"},
        **(facts or {}),
        "packages": {
            "count": len(dists), "env-digest": "sha256:aa", "unlisted-count": 0, "unlisted-digest": "sha256:cc",
            "dist": list(dists),
        },
    }  # fmt: skip
    found, problems = parse(Lockfile, lockfile.from_data(data))
    assert problems == ()
    assert found is not None
    content = lockfile.fingerprint(lockfile.to_data(found))
    return found if edited else found.model_copy(update={"fingerprint": content})


def lines(text: str) -> list[str]:
    """What is not a comment."""
    return [line for line in text.splitlines() if not line.startswith("#")]
