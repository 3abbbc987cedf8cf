"""Runs on a node of the testbed, as its user: many `hpcenv image pull`, and what each of them left.

test_layer_cases.py copies it there. Reads `jobs.json` of the current folder, prints one JSON
document. A warm process forks for each call, so that Python starts once; PATH and HOME are
the caller's.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

# All that an ordinary user can write to.
WRITABLE = ("/home", "/tmp", "/var/tmp", "/dev/shm", "/run", "/shared")


def mine_running() -> set[int]:
    """Return this user's processes that have not ended."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if (
                    entry.stat().st_uid == os.getuid()
                    and "Z" not in (entry / "stat").read_text().rpartition(")")[2][:3]
                ):
                    found.add(int(entry.name))
    return found


def family(first: int) -> set[int]:
    """Return a process and its descendants."""
    found, todo = set(), [first]
    while todo:
        pid = todo.pop()
        found.add(pid)
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                todo += map(int, children.read_text().split())
    return found


def pss_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def files_of_mine(apart: Path) -> dict[str, tuple[int, int, int]]:
    """Return inode, mode and time of change of all that this user owns outside `apart`."""
    mine = os.getuid()
    found = {}
    for top in WRITABLE:
        for folder, below, names in os.walk(top):
            if Path(folder) == apart:
                below.clear()
                continue
            for name in [*below, *names]:
                path = os.path.join(folder, name)
                try:
                    told = os.lstat(path)
                except OSError:
                    continue
                if told.st_uid == mine and Path(path) != apart:
                    # What comes and goes in a folder is told by its entries.
                    changed = 0 if stat.S_ISDIR(told.st_mode) else told.st_ctime_ns
                    found[path] = told.st_ino, told.st_mode, changed
    return found


def run(words: list[str], folder: Path) -> dict[str, Any]:
    """Run one `hpcenv image pull` with --json; tell how it ended and what it took."""
    from hpcenv.cli import main

    began = time.monotonic()
    out = folder / "out.txt"
    pid = os.fork()
    if pid == 0:
        fd = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(os.open(folder / "err.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        try:
            main(words)
        except SystemExit as stop:
            sys.stdout.flush()
            os._exit(stop.code if isinstance(stop.code, int) else 1)
        os._exit(70)
    peak, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            peak[0] = max(peak[0], sum(map(pss_mib, family(pid))))

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(pid, 0)
    ended.set()
    watcher.join()
    return {
        "status": os.waitstatus_to_exitcode(status),
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "peak_mib": round(peak[0], 1),
        "out": out.read_text(),
        "err": (folder / "err.txt").read_text()[-4000:],
    }


def left_in(store: Path) -> list[str]:
    """Return what a refused image left in its store besides blobs and indexes."""
    return [
        str(path.relative_to(store))
        for path in store.rglob("*")
        if path.is_file() and path.relative_to(store).parts[0] not in {"blobs", "indexes"}
    ]


def warm() -> None:
    """Import what the forks would import each for itself."""
    import hpcenv.image.pull  # noqa: F401


def all_jobs() -> dict[str, Any]:
    here = Path.cwd()
    warm()
    before = files_of_mine(here), mine_running()
    results = {}
    for job in json.loads(Path("jobs.json").read_text()):
        store = here / "stores" / job["store"]
        words = ["image", "pull", f"oci:{here}/layouts/{job['layout']}", "--allow-floating", "--json"]
        result = run([*words, "--store", str(store), *job["words"]], here)
        if result["status"] == 0:
            result["path"] = json.loads(result["out"])["data"]["path"]
        result["left"] = left_in(store) if store.is_dir() else []
        results[job["name"]] = result
    after = files_of_mine(here), mine_running()
    changed = [path for path in before[0].keys() | after[0].keys() if before[0].get(path) != after[0].get(path)]
    return {"results": results, "changed": sorted(changed), "processes": sorted(after[1] - before[1])}


if __name__ == "__main__":
    print(json.dumps(all_jobs()))
