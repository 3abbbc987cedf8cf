"""What a failed test adds to its report: the runs that it made. An assertion alone seldom says why a run failed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

# Below these folders of a test there is no run: they are large, or copies.
_NOT_SEARCHED = frozenset({"code", "source", "site-packages", "venv", "layers", "blobs"})
_MOST_RUNS = 3
_MOST_FOLDERS = 5000
_LOG_CHARACTERS = 4000


def describe_runs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield title and text for each of the newest runs below the folder of a test."""
    found = sorted(_run_folders(folder), key=_age)[:_MOST_RUNS]
    for run in reversed(found):
        yield f"run {run}", "\n".join((*_records(run), *_log(run)))


def _run_folders(folder: Path) -> Iterator[Path]:
    looked = 0
    for path, below, files in os.walk(folder):
        looked += 1
        if looked > _MOST_FOLDERS:
            return
        if "manifest.json" in files or "submission.json" in files:
            below.clear()
            yield Path(path)
        below[:] = [name for name in below if name not in _NOT_SEARCHED]


def _age(run: Path) -> float:
    return -max((file.stat().st_mtime for file in run.glob("*.json")), default=0.0)


def _records(run: Path) -> Iterator[str]:
    names = ("submission.json", "started.json", "finished.json", "verdict.json")
    others = sorted((*run.glob("exits/*.json"), *run.glob("ranks/*/*.json"), *run.glob("attempts/*/finished.json")))
    for file in (*(run / name for name in names), *others):
        yield f"{file.relative_to(run)}: {_short(file)}"


def _short(file: Path) -> str:
    try:
        record = json.loads(file.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        return "is not there"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    if file.name == "verdict.json":
        record = {key: record[key] for key in ("result", "attempt") if key in record}
    return json.dumps(record)[:_LOG_CHARACTERS]


def _log(run: Path) -> Iterator[str]:
    try:
        text = (run / "job.log").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        yield f"job.log: {error}"
        return
    yield f"job.log, the last of {len(text)} characters:"
    yield text[-_LOG_CHARACTERS:]
