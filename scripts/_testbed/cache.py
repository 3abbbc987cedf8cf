"""What is slow to make is made once: directories named by the hash of what made them.

An entry is built aside under a lock and published by rename, so a half-made one is never
used, and two `up`s at the same time build each entry once.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from .progress import Progress


def entry(cache: Path, kind: str, recipe: str, build: Callable[[Path], None], progress: Progress) -> Path:
    """The directory for this recipe; `build` fills an empty one if it is not there yet."""
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    final = cache / f"{kind}-{digest}"
    if final.is_dir():
        return final
    # Not mode 0700: unprivileged users of the nodes read through these directories.
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{kind}-{digest}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.is_dir():
            return final
        staging = cache / f"{kind}-{digest}.making"
        if staging.exists():
            progress.say(f"{kind}: removing a half-made one")
            shutil.rmtree(staging)
        staging.mkdir()
        with progress.phase(f"{kind}: making {final.name} (kept for the next time)"):
            build(staging)
        (staging / ".recipe").write_text(recipe)
        staging.rename(final)
    return final
