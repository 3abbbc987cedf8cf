"""ro-crate-metadata.json of a bundle: what ran, with which program, on what, with which result.

Runs on: LOGIN NODE. RO-Crate 1.1 (the version that Process Run Crate 0.5 builds on), written with `rocrate`.
Process Run Crate: https://w3id.org/ro/wfrun/process/0.5, read 2026-11-22.
"""

from __future__ import annotations

import datetime as dt
import json
import warnings
from collections.abc import Sequence
from typing import Any

from hpcenv.reproduce.bundle.archive import BundleMember
from hpcenv.reproduce.record import RunRecord

METADATA = "ro-crate-metadata.json"
_PROFILE = "https://w3id.org/ro/wfrun/process/0.5"
_ACTION = "#run"
_PROGRAM = "#program"
_AGENT = "#agent"
_COMPLETED = "http://schema.org/CompletedActionStatus"
_FAILED = "http://schema.org/FailedActionStatus"
_MEDIA_TYPES = {
    ".json": "application/json",
    ".toml": "application/toml",
    ".py": "text/x-python",
    ".md": "text/markdown",
}
_RESULTS = ("metrics/", "record.json")


def metadata(record: RunRecord, members: Sequence[BundleMember], authors: tuple[str, ...]) -> str:
    """Return the text of ro-crate-metadata.json.

    Args:
        members: the files of the bundle; links are left out, because RO-Crate has no word for them.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from rocrate.model.contextentity import ContextEntity  # type: ignore[import-untyped]
        from rocrate.rocrate import ROCrate  # type: ignore[import-untyped]

    crate = ROCrate(version="1.1")

    def add(identifier: str, **properties: Any) -> Any:
        return crate.add(ContextEntity(crate, identifier, properties=properties))

    profile = add(_PROFILE, **{"@type": "CreativeWork", "name": "Process Run Crate", "version": "0.5"})
    names = [member.name for member in members if not member.link]
    files = {name: crate.add_file(dest_path=name, properties=_properties(name)) for name in names}
    program = add(_PROGRAM, **_program(record))
    agent = add(_AGENT, **{"@type": "Person", "name": authors[0] if authors else "not named"})
    action = add(_ACTION, **_action(record))
    action["instrument"] = program
    action["agent"] = agent
    action["object"] = [files[name] for name in names if not name.startswith(_RESULTS)]
    action["result"] = [files[name] for name in names if name.startswith(_RESULTS)]
    root = crate.root_dataset
    root["conformsTo"] = profile
    root["mentions"] = action
    root["name"] = f"Training run {record.run}"
    root["description"] = _description(record)
    # The time of the run: the same run gives the same bytes.
    root["datePublished"] = _time(_end(record))
    root["license"] = add("#license", **{"@type": "CreativeWork", "name": "not stated", "description": _LICENSE})
    return json.dumps(crate.metadata.generate(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


_LICENSE = "The authors have not stated a license in this bundle; the code in it may state one."


def _properties(name: str) -> dict[str, Any]:
    suffixes = {
        ".json": "application/json",
        ".toml": "application/toml",
        ".py": "text/x-python",
        ".md": "text/markdown",
    }
    kind = next((kind for suffix, kind in suffixes.items() if name.endswith(suffix)), None)
    return {"name": name} if kind is None else {"name": name, "encodingFormat": kind}


def _program(record: RunRecord) -> dict[str, Any]:
    properties: dict[str, Any] = {
        "@type": "SoftwareApplication",
        "name": " ".join(record.program),
        "softwareVersion": record.code.commit or record.code.digest or "not recorded",
        "description": "the program that torchrun started on every rank",
    }
    if record.lock is not None:
        image = record.lock.manifest_digest or record.lock.sif_sha256 or record.lock.image
        properties["softwareRequirements"] = f"environment {record.lock.fingerprint}, image {image}"
    return properties


def _action(record: RunRecord) -> dict[str, Any]:
    done = record.outcome == "completed"
    shape = record.shape
    properties: dict[str, Any] = {
        "@type": "CreateAction",
        "name": f"hpcenv run {record.run}",
        "description": " ".join(record.command) or "hpcenv submit",
        "startTime": _time(record.submitted),
        "endTime": _time(_end(record)),
        "actionStatus": {"@id": _COMPLETED if done else _FAILED},
    }
    if not done:
        properties["error"] = record.outcome
    properties["description"] += f" ({shape.nodes} nodes, {shape.gpus_per_node} GPUs each, {shape.world_size} ranks)"
    return properties


def _description(record: RunRecord) -> str:
    fingerprint = "unknown" if record.lock is None else record.lock.fingerprint
    return f"Locked environment {fingerprint}, code, command and results; `hpcenv reproduce` runs it again."


def _end(record: RunRecord) -> float:
    ends = [attempt.ended for attempt in record.attempts if attempt.ended is not None]
    return max(ends, default=record.submitted)


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, tz=dt.timezone.utc).isoformat(timespec="seconds")
