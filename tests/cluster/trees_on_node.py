"""Runs on the testbed's login node, in `buildah unshare`: the tree of an image as buildah mounts it, and that of its SIF.

test_real_dockerfiles.py copies it there. Arguments: id of the image, the SIF, where its squashfs begins. Prints one JSON
document.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path


def said(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def tree(root: str) -> dict[str, list[str]]:
    """Return kind, permissions, and content or target of each path."""
    found = {}
    for folder, below, names in os.walk(root):
        for name in [*below, *names]:
            path = os.path.join(folder, name)
            mode = os.lstat(path).st_mode
            about = [stat.filemode(mode)]
            if stat.S_ISLNK(mode):
                about = ["link", os.readlink(path)]
            elif stat.S_ISREG(mode):
                about.append(hashlib.sha256(Path(path).read_bytes()).hexdigest())
            found[os.path.relpath(path, root)] = about
    return found


def main(image: str, sif: str, offset: str) -> None:
    container = said("buildah", "from", "--pull-never", image)
    config = json.loads(said("buildah", "inspect", "--type", "image", image))["OCIv1"].get("config", {})
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            ["unsquashfs", "-n", "-q", "-o", offset, "-d", f"{folder}/sif", sif], check=True, stdout=sys.stderr
        )
        trees = {"image": tree(said("buildah", "mount", container)), "sif": tree(f"{folder}/sif")}
    said("buildah", "rm", container)
    names = sorted(trees["image"].keys() | trees["sif"].keys())
    different = {name: [trees[of].get(name) for of in ("image", "sif")] for name in names}
    different = {name: pair for name, pair in different.items() if pair[0] != pair[1]}
    print(json.dumps({"paths": len(trees["image"]), "different": different, "config": config}))


main(*sys.argv[1:])
