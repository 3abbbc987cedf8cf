"""The origin of a result: the environment of a rank, and the record beside a checkpoint.

Runs on: every rank, inside the image or not, and LOGIN NODE (`hpcenv submit --resume-from`). Standard library only, and
torch if the script has imported it; Python >= 3.8.

A run gives its ranks their identity in variables: `HPCENV_RUN`, `HPCENV_FINGERPRINT` (of the lockfile), `HPCENV_COMMIT`
(of the code; if files differ from the commit, `-dirty` and the beginning of the digest of that difference follow).
"""

from __future__ import annotations

import json
import os
import re
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any, Mapping, NamedTuple
else:
    from typing import NamedTuple

SCHEMA = 1
# Folder of the checkpoints of a run (records/run_folder.py).
CHECKPOINTS = "checkpoints"
CHECKPOINT = re.compile(r"step-(\d{1,18})(\.pt)?\Z")
# A record has about twelve short values; a larger file is refused, because a checkpoint may come from another person.
_LONGEST_RECORD = 64 << 10
_LONGEST_VALUE = 200


class OtherValue(NamedTuple):
    """A value that has changed since a checkpoint was written.

    Attributes:
        name: name of the value, in words.
        before: the value in the record beside the checkpoint.
        now: the value of this run.
        why: the possible effect of the difference.
    """

    name: str
    before: str
    now: str
    why: str

    def __str__(self) -> str:
        return "%s was %s and is %s now: %s" % self


# Key of the record -> its name for users, and the possible effect of a difference.
COMPARED = {
    "torch": ("torch", "formats and results may differ"),
    "world_size": ("the world size", "shards and the order of the data may not fit"),
    "global_batch": ("the global batch", "the learning rate and the number of steps belong to it"),
    "fingerprint": ("the lockfile", "the environment is another one"),
    "commit": ("the code", "the model may be another one"),
}


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint in a folder; None if the folder has no checkpoint or does not exist."""
    try:
        found = [(step_of(path), path) for path in folder.iterdir() if step_of(path) is not None]
    except OSError:
        return None
    return max(found, key=lambda one: (one[0], str(one[1])))[1] if found else None


def step_of(checkpoint: Path) -> int | None:
    """Return the step of a checkpoint; None if the path is not named like a checkpoint."""
    match = CHECKPOINT.match(checkpoint.name)
    return None if match is None else int(match.group(1))


def record_of(checkpoint: Path) -> Path:
    """Return the path of the record beside a checkpoint: `step-00000010.json`."""
    stem = checkpoint.name[:-3] if checkpoint.name.endswith(".pt") else checkpoint.name
    return checkpoint.with_name(stem + ".json")


# -- this rank ------------------------------------------------------------------------------


def identity(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the name, the environment and the code of this run; None for an unknown value."""
    return {
        "run": environ.get("HPCENV_RUN") or None,
        "attempt": _number(environ.get("HPCENV_ATTEMPT")),
        "fingerprint": environ.get("HPCENV_FINGERPRINT") or None,
        "commit": environ.get("HPCENV_COMMIT") or None,
        "torch": torch_version(),
        "python": "%d.%d.%d" % sys.version_info[:3],
        "world_size": world_size(environ),
    }


def environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the result of `identity`, and this rank, the versions of libraries, and the GPU that torch uses here."""
    return {
        **identity(environ),
        "rank": _number(environ.get("RANK")) or 0,
        "node": environ.get("HPCENV_NODE") or os.uname().nodename,
        "numpy": _version("numpy"),
        **_of_torch(sys.modules.get("torch")),
    }


def world_size(environ: Mapping[str, str]) -> int:
    """Return the number of ranks from torch.distributed, otherwise from the launch; 1 if both give no number."""
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return int(module.get_world_size())
    return _number(environ.get("WORLD_SIZE")) or 1


def torch_version() -> str | None:
    """Return the version of the imported torch, otherwise of the installed torch."""
    return _version("torch")


def _version(name: str) -> str | None:
    found = getattr(sys.modules.get(name), "__version__", None)
    if found is not None:
        return str(found)
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _of_torch(torch: Any) -> dict[str, Any]:
    """Return the versions of the libraries that torch uses, and the GPU of this rank.

    All values are None if the script has not imported torch.
    """
    empty = {"cuda": None, "hip": None, "cudnn": None, "nccl": None, "gpu": None}
    if torch is None:
        return empty
    found = {**empty, "cuda": torch.version.cuda, "hip": getattr(torch.version, "hip", None)}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = _dotted(torch.backends.cudnn.version())
    if torch.version.cuda is not None:
        try:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        except (AttributeError, RuntimeError, TypeError):  # a build without NCCL
            pass
    if torch.cuda.is_available():
        found["gpu"] = _gpu(torch)
    return found


def _gpu(torch: Any) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": properties.name,
        "compute_capability": "%d.%d" % (properties.major, properties.minor),
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
    }


def _driver() -> str | None:
    """Return the version of NVIDIA's kernel driver (its README, "/proc/driver/nvidia/version", 2026)."""
    try:
        with open("/proc/driver/nvidia/version", encoding="ascii", errors="replace") as file:
            match = re.search(r"\b(\d{3,}\.\d+(\.\d+)?)\b", file.readline(1000))
    except OSError:
        return None
    return None if match is None else match.group(1)


def _dotted(number: int | None) -> str | None:
    """Return a version of cuDNN: 8902 is 8.9.2, 91002 is 9.10.2 (cudnn_version.h)."""
    if number is None:
        return None
    unit = 1000 if number < 10000 else 10000
    return "%d.%d.%d" % (number // unit, number % unit // 100, number % 100)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and re.match(r"\d{1,9}\Z", text) else None


# -- the record beside a checkpoint ---------------------------------------------------------


def write_record(checkpoint: Path, environ: Mapping[str, str], *, global_batch: int | None) -> None:
    """Write the record beside a checkpoint.

    Raises:
        OSError: the record could not be written.
    """
    record = {"schema": SCHEMA, "step": step_of(checkpoint), **identity(environ), "global_batch": global_batch}
    path = record_of(checkpoint)
    aside = path.with_name(".%s.%d.part" % (path.name, os.getpid()))
    aside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def read_record(checkpoint: Path) -> dict[str, Any] | str:
    """Return the record beside a checkpoint, or why it cannot be read."""
    path = record_of(checkpoint)
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST_RECORD + 1)
        if len(content) > _LONGEST_RECORD:
            return "%s is too long" % path.name
        record = json.loads(content.decode("utf-8"))
    except FileNotFoundError:
        return "there is no %s" % path.name
    except OSError as error:
        return "%s: %s" % (path.name, error.strerror)
    except (ValueError, RecursionError):
        return "%s is damaged" % path.name
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        return "%s has another schema than %d" % (path.name, SCHEMA)
    return record


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[OtherValue]:
    """Return the values that both records know and that differ."""
    return [
        OtherValue(words, _shown(before[key]), _shown(now[key]), why)
        for key, (words, why) in COMPARED.items()
        if before.get(key) is not None and now.get(key) is not None and before[key] != now[key]
    ]


def judge(checkpoint: Path, now: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each difference between a checkpoint and this run, or for an unreadable record."""
    before = read_record(checkpoint)
    if isinstance(before, str):
        return ["not known with which environment %s was written: %s" % (checkpoint.name, before)]
    unknown = [COMPARED[key][0] for key in ("torch", "world_size") if before.get(key) is None]
    found = ["%s: %s" % (checkpoint.name, one) for one in differences(before, now)]
    return found + ["%s: %s is not known" % (checkpoint.name, name) for name in unknown]


def _shown(value: Any) -> str:
    """Return an untrusted value as one line of text. A commit is cut to its first digits."""
    text = "".join(char if char.isprintable() else "?" for char in str(value))[:_LONGEST_VALUE]
    return re.sub(r"\A([0-9a-f]{12})[0-9a-f]{28,52}", r"\1", text)
