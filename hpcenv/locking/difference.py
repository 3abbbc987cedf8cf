"""The differences between two locked environments or runs. The differences that are hardest to remove come first. Pure.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from hpcenv.project import document, fields
from hpcenv.project.code_listing import code_files, different
from hpcenv.project.fields import REPAIRS, Repair
from hpcenv.project.lockfile import DistTable, Lockfile, LockTable, bind_contents, source_fields
from hpcenv.records.code_listing import Listing
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest, Severity, Value
from hpcenv.records.package_fields import package_field
from hpcenv.records.severities import STRICTEST_FIRST, Severities, strictest
from hpcenv.records.verdict import Verdict
from hpcenv.text import listed

ABSENT = "absent"

_SIF, _MADE_AGAIN = "container.sif.sha256", "container.sif.made-again"
_CHAIN = "container.rootfs-chain-id"
_OVERLAY, _OVERLAY_TREE = "container.overlay.sha256", "container.overlay.tree-sha256"
_OVERLAY_MADE_AGAIN = "container.overlay.made-again"

# If single packages differ, these fields differ too, so they add no information.
_EXPLAINED_BY_PACKAGES = ("packages.env-digest", "packages.content-digest", "packages.count")


@dataclass(frozen=True, kw_only=True)
class Change:
    """One field in which two sides differ.

    Attributes:
        repair: the work that makes the sides equal. Changes are sorted by `repair`.
        severity: the stricter severity of the two sides.
        what, why, remedy: texts from the table of fields.
    """

    field: str
    left: str
    right: str
    repair: Repair
    severity: Severity
    what: str
    why: str
    remedy: str


def compare(
    left: Mapping[str, Value], right: Mapping[str, Value], *, severities: Sequence[Severities], sifs_fit: bool = True
) -> tuple[Change, ...]:
    """Compare two sides field by field.

    Args:
        left, right: dotted field -> value, from `of_lockfile` or `of_run`.
        severities: the severities of each side; the stricter severity counts.
        sifs_fit: whether each side's SIF is the locked SIF, or was found to have the same file tree.

    Returns:
        The differences, hardest to remove first, then by severity and name.
    """
    names = {name for name in {*left, *right} if left.get(name) != right.get(name)}
    if any(_is_package(name) for name in names):
        names -= set(_EXPLAINED_BY_PACKAGES)
    chain = left.get(_CHAIN)
    one_file_system = chain is not None and chain == right.get(_CHAIN) and sifs_fit
    tree = left.get(_OVERLAY_TREE)
    one_overlay = tree is not None and tree == right.get(_OVERLAY_TREE)
    changes = []
    for name in sorted(names):
        # Both files contain the same file system: the layers were compressed again, or the SIF was made again.
        judged_as = _MADE_AGAIN if name == _SIF and one_file_system else name
        judged_as = _OVERLAY_MADE_AGAIN if name == _OVERLAY and one_overlay else judged_as
        severity = strictest(one.of(judged_as) for one in severities)
        changes.append(change_of(name, left.get(name), right.get(name), severity))
    return tuple(sorted(changes, key=_hardest_first))


def _is_package(name: str) -> bool:
    field = fields.find(name)
    return field is not None and field.name.startswith("packages.*")


def change_of(name: str, left: Value | None, right: Value | None, severity: Severity) -> Change:
    """Return the difference in one field."""
    field = fields.find(name)
    return Change(
        field=name,
        left=show(left),
        right=show(right),
        repair=field.repair if field else "note",
        severity=severity,
        what=field.what if field else "",
        why=field.why if field else "",
        remedy=field.hint if field else "",
    )


def _hardest_first(change: Change) -> tuple[int, int, str]:
    return REPAIRS.index(change.repair), STRICTEST_FIRST.index(change.severity), change.field


def show(value: Value | None) -> str:
    """Return a value as one line of text."""
    if value is None:
        return ABSENT
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def of_lockfile(lockfile: Lockfile) -> dict[str, Value]:
    """Turn a lockfile into dotted fields."""
    flat: dict[str, Value] = dict(lockfile.facts)
    if lockfile.container is not None:
        flat |= _flatten("container", _tables(lockfile.container, "layers"))
    flat |= _flatten("host", _tables(lockfile.host))
    if lockfile.bind:
        modes = (f"{bind.target} ({'read-only' if bind.read_only else 'read-write'})" for bind in lockfile.bind)
        flat["container.binds"] = tuple(sorted(modes))
        contents = tuple(f"{path} {digest}" for path, digest in bind_contents(lockfile))
        flat |= {"container.bind-content": contents} if contents else {}
    flat |= {f"env.{name}": value for name, value in lockfile.env.items()}
    flat["determinism.profile"] = lockfile.determinism.profile
    if lockfile.policy:
        flat["policy"] = tuple(f"{field} = {severity}" for field, severity in sorted(lockfile.policy.items()))
    packages = lockfile.packages
    flat["packages.env-digest"] = packages.env_digest
    flat["packages.unlisted-digest"] = packages.unlisted_digest
    flat["packages.unlisted-count"] = packages.unlisted_count
    flat["packages.count"] = packages.count
    for name, value in (
        ("content-digest", packages.content_digest),
        ("conda-count", packages.conda_count),
        ("conda-digest", packages.conda_digest),
        ("conda-content-digest", packages.conda_content_digest),
        ("conda-modified", packages.conda_modified or None),
    ):
        if value is not None:
            flat[f"packages.{name}"] = value
    for dist in packages.dist:
        flat[package_field(dist.name)] = dist.version
        flat.update({f"packages.{dist.name}.{part}": value for part, value in _parts(dist) if value is not None})
    return flat


def _parts(dist: DistTable) -> Iterator[tuple[str, Value | None]]:
    yield "record-sha256", dist.record_sha256
    yield "content-sha256", dist.content_sha256
    yield "programs-sha256", dist.programs_sha256
    yield "layer", dist.layer
    yield "hides", dist.hides
    yield "source", dist.source
    yield "wheel-sha256", dist.wheel.sha256 if dist.wheel else None
    built = dist.wheel.built if dist.wheel else None
    yield "nvcc", built.nvcc if built else None
    yield "compiler", built.compiler if built else None
    yield from source_fields(dist.direct_url).items()


def _tables(table: LockTable, *left_out: str) -> dict[str, Any]:
    return document.plain(table, *left_out)


def _flatten(prefix: str, value: Any) -> dict[str, Value]:
    """Turn nested tables into dotted fields."""
    if not isinstance(value, dict):
        return {prefix: tuple(value) if isinstance(value, list) else value}
    return {field: one for key, inner in value.items() for field, one in _flatten(f"{prefix}.{key}", inner).items()}


def of_run(
    lockfile: Lockfile,
    manifest: Manifest,
    verdict: Verdict | None,
    facts: Mapping[str, Facts],
    finished: Mapping[str, Any],
) -> dict[str, Value]:
    """Turn a run into dotted fields: its environment, command, shape, settings, nodes and its end.

    A value that is equal on all nodes appears once. If nodes differ, the value of each node is listed.
    """
    flat = environment_of_run(lockfile, verdict, facts)
    flat["run.nodes"] = manifest.nodes
    flat["run.nproc-per-node"] = manifest.nproc_per_node
    flat["run.gpus-per-node"] = manifest.gpus_per_node
    flat["run.backend"] = manifest.backend
    flat["run.script"] = _script_of(manifest)
    flat["run.arguments"] = manifest.args
    flat[OUTCOME] = outcome_of(verdict, finished)
    if manifest.stage is not None and manifest.stage.data:
        flat["run.data"] = tuple(f"{data.source} {data.listing_sha256}" for data in manifest.stage.data)
    if lockfile.code is not None:
        flat |= _flatten("code", _tables(lockfile.code, "reason"))
    for name, one in lockfile.data.items():
        flat[f"data.{name}"] = f"{one.compare}: {one.state}"
    if verdict is not None and verdict.settings:
        for per_node in (verdict.inherited, verdict.settings):
            first = next(iter(per_node.values()), ())
            flat.update({f"env.{setting.name}": setting.value for setting in first})
    for name in sorted({n for f in facts.values() for n in f.values if n.startswith("host.") and n != "host.hostname"}):
        flat[name] = _of_nodes({node: f.values[name] for node, f in facts.items() if name in f.values})
    return flat


OUTCOME, COMPLETED = "run.outcome", "completed"


def outcome_of(verdict: Verdict | None, finished: Mapping[str, Any]) -> str:
    """Return whether a run trained. If it trained but did not complete, say how it ended."""
    if verdict is None:
        return "never trained: there is no verdict"
    if verdict.result != "match":
        return f"never trained: the verdict is {verdict.result}"
    status = finished.get("status")
    if not isinstance(status, int):
        return "has not ended"
    if finished.get("cancelled") is True:
        return "cancelled"
    if status == 0 and (finished.get("again") is True or finished.get("not_again")):
        return "stopped before its end"
    return COMPLETED if status == 0 else f"ended with status {status}"


def _script_of(manifest: Manifest) -> str:
    """Return the module, or the script's path in the copy of the project; without a copy, the script's name."""
    if manifest.module or manifest.entry:
        return f"--entry {manifest.entry}" if manifest.entry else f"-m {manifest.module}"
    path = PurePath(manifest.script)
    folder = None if manifest.source is None else manifest.source.folder
    return str(path.relative_to(folder)) if folder and path.is_relative_to(folder) else path.name


def sif_fits(manifest: Manifest, verdict: Verdict | None, facts: Mapping[str, Facts]) -> bool:
    """Return whether every node of a run found one of the SIFs in the plan of the run."""
    planned = {expected.value for expected in manifest.expectations if expected.field == _SIF}
    trained = verdict.launched if verdict is not None else ()
    found = {f.values[_SIF] for node, f in facts.items() if _SIF in f.values and (node in trained or not trained)}
    refused = verdict is not None and any(row.field == _SIF and row.severity == "must" for row in verdict.findings)
    return found <= planned and not refused


def not_compared(lockfile: Lockfile, manifest: Manifest, facts: Mapping[str, Facts]) -> tuple[str, ...]:
    """Return the parts of a run that were not recorded and so are not compared."""
    code, source = lockfile.code, manifest.source
    missing = []
    if manifest.launches and source is None:
        by = "" if code is None or code.workdir is None else " (--workdir live)"
        missing.append(f"files of the project: the run used them in place{by}")
    elif source is not None and source.live:
        missing.append(f"files that the run's copy only links to: {', '.join(source.live)}")
    if manifest.launches and not manifest.data and (manifest.stage is None or not manifest.stage.data):
        missing.append("data that the script reads")
    if not facts:
        missing.append("what the nodes found: there are no facts")
    unread = sorted({name for f in facts.values() for name in f.unknown})
    if unread:
        missing.append(f"what a node could not read: {listed(unread, 3)}")
    return tuple(missing)


def environment_of_run(lockfile: Lockfile, verdict: Verdict | None, facts: Mapping[str, Facts]) -> dict[str, Value]:
    """Turn a run's lockfile into dotted fields. If nodes found other values, these replace the locked values.

    Only nodes that trained count. The values of these nodes may differ from the lockfile, because the lockfile's policy
    allows a difference, or because the SIF was made again.
    """
    flat = of_lockfile(lockfile)
    trained = verdict.launched if verdict is not None else ()
    of_trained = {node: f for node, f in facts.items() if node in trained or not trained}
    for name in [name for name in flat if not name.startswith("host.")]:
        seen = {node: f.values[name] for node, f in of_trained.items() if name in f.values}
        if any(value != flat[name] for value in seen.values()):
            flat[name] = _of_nodes(seen)
    for name in sorted({d.field for f in of_trained.values() for d in f.differences if not d.unknown}):
        flat[name] = _of_nodes(
            {node: d.found for node, f in of_trained.items() for d in f.differences if d.field == name}
        )
    return flat


def with_files(values: Sequence[Mapping[str, Value]], listings: Sequence[Listing | None]) -> list[Mapping[str, Value]]:
    """Return the values of two runs, and add the copied files that differ between the runs.

    A file is not compared if one of the copies only has a link to it. If all other code is equal, the digests of the
    copies and of their uncommitted changes are not compared either.

    Args:
        listings: the files in the copies of both runs; None for a run without a copy.
    """
    left, right = listings
    if left is None or right is None:
        return list(values)
    sides = code_files(left.files), code_files(right.files)
    names = [path for path in different(*sides) if path not in left.live and path not in right.live]
    if not names:
        return [{name: one[name] for name in one if name not in _OF_COPIES} for one in values]
    return [
        {
            **one,
            "code.files": tuple(
                f"{path.partition('/')[2]} {side.get(path, ABSENT)[:12]}" for path in names[:_FILES_SHOWN]
            ),
        }
        for one, side in zip(values, sides, strict=True)
    ]


_FILES_SHOWN = 10
# These fields describe how a copy was made; the listed files describe its content.
_OF_COPIES = ("code.digest", "code.diff-sha256")


def _of_nodes(seen: Mapping[str, Value]) -> Value:
    if len(set(seen.values())) == 1:
        return next(iter(seen.values()))
    return tuple(f"{node}: {show(value)}" for node, value in sorted(seen.items()))
