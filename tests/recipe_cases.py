"""What the tests of recipes share: combinations and packages of the packaged table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hpcenv.project import compatibility
from hpcenv.recipes import combination
from hpcenv.recipes.pinned_packages import PinnedPackage

COMPAT = compatibility.table()
DIGEST = "sha256:" + "a" * 64
HASH = "sha256:" + "b" * 64


def choose(torch="2.13.0", cuda=None, python=None, distribution="bookworm"):
    return combination.choose(COMPAT, torch=torch, cuda=cuda, python=python, distribution=distribution)


def pin(name, version="1.0", *, file=None, hashes=(HASH,)):
    return PinnedPackage(name=name, version=version, hashes=hashes, files=(file,) if file else ())


def hadolint(file):
    """Return what hadolint says about a Dockerfile."""
    argv = [Path(sys.executable).with_name("hadolint"), "--no-color", file]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout
