"""The cache folder: it keeps proofs, and the results of reading wheels.

Runs on: LOGIN NODE, and in the process beside pip: standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcenv.locking.wheels.names import is_of_package, package_key
from hpcenv.locking.wheels.proof import HEX_SHA256, Index, InstalledDist, KnownFile, WheelProof

CACHE_SCHEMA = 2


def pip_configuration_digest(index: Index | None) -> str:
    """Return a digest over pip's configuration. A proof names an index, so it is valid for this configuration only."""
    if index is None:
        return ""
    env = index.env
    home = env.get("HOME", "")
    paths = [env.get("PIP_CONFIG_FILE", ""), "/etc/pip.conf", f"{home}/.pip/pip.conf"]
    paths += [f"{base}/pip/pip.conf" for base in env.get("XDG_CONFIG_DIRS", "/etc/xdg").split(":")]
    paths.append((env.get("XDG_CONFIG_HOME") or f"{home}/.config") + "/pip/pip.conf")
    paths.append(os.path.join(os.path.dirname(os.path.dirname(index.python)), "pip.conf"))
    parts = [f"{name}={value}" for name, value in sorted(env.items()) if name.startswith("PIP_")]
    for path in paths:
        with contextlib.suppress(OSError):
            parts.append(path + "=" + hashlib.sha256(Path(path).read_bytes()).hexdigest())
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def proof_key(dist: InstalledDist, claims: Sequence[KnownFile], setting: str) -> list[Any]:
    """Return the key of a cached proof: everything that the proof depends on."""
    claimed = sorted([claim.filename, claim.sha256] for claim in claims)
    programs = None if dist.programs is None else sorted([path, digest] for path, digest in dist.programs.items())
    return [*package_key(dist), dist.build, sorted(dist.tags), dist.record_sha256, programs, claimed, setting]


def cached_proof(dist: InstalledDist, cache: Path, key: list[Any]) -> WheelProof | None:
    """Return a cached proof. Only proofs by RECORD are kept: they stay valid if the index changes later."""
    entry = read_entry(cache, "proof", key)
    try:
        proof = WheelProof(**entry["proof"]) if entry else None
    except (TypeError, KeyError):
        return None
    if proof is None or proof.proof != "record" or proof.name != dist.name:
        return None
    valid = HEX_SHA256.fullmatch(str(proof.sha256)) and re.fullmatch(r"pypi|extra-\d+|find-links", str(proof.index))
    return proof if valid and is_of_package(str(proof.filename), package_key(dist)) else None


def read_entry(cache: Path, kind: str, key: list[Any]) -> dict[str, Any] | None:
    """Return an entry that this user wrote, if the entry is complete and has this key; otherwise None."""
    try:
        with _entry_path(cache, kind, key).open("rb") as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return None  # another user could have written anything
            entry = json.loads(file.read(1 << 20))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("key") != key or entry.pop("check", "") != _checksum(entry):
        return None
    return entry


def write_entry(cache: Path, kind: str, key: list[Any], values: Mapping[str, Any]) -> None:
    """Write an entry to a temporary file, then rename the file. If the folder cannot be written, no error is raised."""
    entry = {"key": key, **values}
    path = _entry_path(cache, kind, key)
    text = json.dumps(entry | {"check": _checksum(entry)})
    temporary = f"{path}.{os.getpid()}.{threading.get_ident()}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        Path(temporary).write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _entry_path(cache: Path, kind: str, key: list[Any]) -> Path:
    name = hashlib.sha256(json.dumps([CACHE_SCHEMA, kind, key]).encode()).hexdigest()
    return cache / f"{kind}-{name}.json"


def _checksum(entry: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps([CACHE_SCHEMA, entry], sort_keys=True).encode()).hexdigest()
