"""A project whose lockfile names an image in a registry, made from the lockfile of a Python on this machine.

So `check.pyz` runs here as it does in the container: the packages are those that were locked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tomlkit
import tomllib

from hpcenv.project import lockfile as lock_model

DIGEST = f"sha256:{'a' * 64}"
REFERENCE = "docker://registry.example:5000/team/train:v1"
IMAGE = f"registry.example:5000/team/train@{DIGEST}"


def name_image(project: Path, reference: str = REFERENCE, **container: Any) -> None:
    """Let the project and its lockfile name an image.

    Args:
        container: more keys of the table [container].
    """
    spec = project / "hpcenv.toml"
    spec.write_text(spec.read_text().replace('image = "host"', f'image = "{reference}"'))
    path = project / "lockfiles" / "default.lock.toml"
    data = tomllib.loads(path.read_text())
    data["kind"], data["asked"]["image"] = "sif", reference
    data["container"] = {
        "reference": reference,
        "manifest-digest": DIGEST,
        "platform": "linux/amd64",
        "sif": {
            "sha256": "b" * 64,
            "size": 1,
            "partition-sha256": "c" * 64,
            "partition-size": 1,
            "compression": "zstd",
            "arch": "amd64",
        },
        **container,
    }
    # Apptainer adds it while an image is locked.
    data["libs"]["ld-library-path"] = ["/.singularity.d/libs"]
    data["fingerprint"] = lock_model.fingerprint(data)
    path.write_text(tomlkit.dumps(data))
