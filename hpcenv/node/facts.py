"""Facts of one node: the SIF's identity, the inside of the environment, the host.

Runs on: COMPUTE NODE. Each part is independent and yields `unknown` with a reason when it
fails: one broken probe must not hide what the others found.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcenv.adapters import process
from hpcenv.dataclass import dataclass, replace
from hpcenv.errors import HpcenvError, ToolFailed
from hpcenv.node import host, network, sif_check
from hpcenv.node.door import leads_to
from hpcenv.node.enter import data_binds, enter, own_folders, staged_here
from hpcenv.node.place import Place
from hpcenv.wire import (
    SCHEMA,
    SKIPPED,
    Bind,
    CheckedSif,
    Difference,
    Environment,
    Facts,
    Manifest,
    Network,
    PackageExpectation,
    Staged,
    Value,
)

_SIF = "container.sif.sha256"


class _Gathered:
    """Facts as they come in; frozen into `Facts` at the end."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.unknown: dict[str, str] = {}
        self.differences: list[Difference] = []
        self.unlisted: tuple[str, ...] = ()
        self.seconds: dict[str, float] = {}
        self.sif: CheckedSif | None = None


def gather(
    manifest: Manifest,
    place: Place,
    environ: Mapping[str, str],
    *,
    probe: str,
    record_places: Sequence[Path] = sif_check.NODE_PLACES,
) -> Facts:
    """Return everything this node can tell about itself and the environment.

    Args:
        manifest: the run.
        place: this node.
        environ: the environment of the step.
        probe: source text of incontainer/probe.py.
        record_places: where this node may keep hashes that it has taken.
    """
    found = _Gathered()
    outside = _Outside(manifest, place, environ)
    outside.start()
    staged = staged_here(manifest, place)
    _timed(found, "script", lambda: _read_script(manifest, found))
    if manifest.environment.kind == "sif":
        _timed(found, "sif", lambda: _read_sif(manifest, staged, environ, found, probe, record_places))
    else:
        _timed(found, "probe", lambda: _probe(manifest, staged, environ, found, probe, image_fd=None))
    outside.join()
    return Facts(
        schema=SCHEMA,
        run=manifest.run,
        node=place.node,
        attempt=place.attempt,
        network=outside.network,
        # What the host says of itself is not the environment's to say.
        values=found.values | outside.found.values,
        unknown=found.unknown | outside.found.unknown,
        differences=tuple(found.differences),
        unlisted=found.unlisted,
        sif=found.sif,
        not_staged=staged.problems,
        seconds={
            **outside.found.seconds,
            **found.seconds,
            **{f"stage {part}": took for part, took in staged.seconds.items()},
        },
    )


def _timed(found: _Gathered, name: str, part: Callable[[], None]) -> None:
    started = time.monotonic()
    try:
        part()
    except Exception as error:  # noqa: BLE001  (whatever it is: it must not hide the other parts)
        found.unknown[name] = _reason(error)
    found.seconds[name] = round(time.monotonic() - started, 3)


def _reason(error: Exception) -> str:
    """Return an error in one line, for a cell of the table."""
    if not isinstance(error, HpcenvError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, ToolFailed):
        # Its `why` is the whole command line, which no table can hold.
        said = error.stderr.strip().splitlines()
        detail = said[-1] if said else getattr(error.__cause__, "strerror", None)
        return f"{error.what}: {detail}" if detail else error.what
    return f"{error.what}: {error.why}" if error.why else error.what


# -- the host -----------------------------------------------------------------------------


class _Outside(threading.Thread):
    """Looks at host and network while the container starts and is looked at: a driver may take seconds to answer.

    Attributes:
        found, network: what it found; of nobody else before it has ended.
    """

    def __init__(self, manifest: Manifest, place: Place, environ: Mapping[str, str]) -> None:
        # A daemon: a step that is told to end does not wait for a driver.
        super().__init__(name="hpcenv-outside", daemon=True)
        self.found = _Gathered()
        self.network = Network(first_node=place.nodes[0])
        self._manifest = manifest
        self._place = place
        self._environ = environ

    def run(self) -> None:
        _timed(self.found, "host", self._read_host)
        _timed(self.found, "network", self._observe)
        if "network" in self.found.unknown:
            self.network = replace(self.network, problem=self.found.unknown["network"])

    def _read_host(self) -> None:
        _read_host(self.found, self._environ, self._manifest.environment.apptainer)

    def _observe(self) -> None:
        # As many as can be left out: the next one then is the first.
        others = self._place.nodes[1 : 1 + self._manifest.spare]
        self.network = network.observe(self._place.nodes[0], self._environ, others=others)


def _read_host(found: _Gathered, environ: Mapping[str, str], apptainer: str) -> None:
    found.values["host.hostname"] = os.uname().nodename
    found.values["host.machine"] = os.uname().machine
    found.values["host.cpus"] = len(os.sched_getaffinity(0))
    from hpcenv.adapters import nvml  # slow to load, and here beside the container

    for part in (nvml.read(environ=environ), host.read(environ, apptainer=apptainer or "apptainer")):
        found.values.update(part.values)
        found.unknown.update(part.unknown)


def _read_script(manifest: Manifest, found: _Gathered) -> None:
    """The script as this node sees it: a stale cache or a node-local path shows here."""
    if not manifest.script:
        return
    try:
        found.values["code.script-sha256"] = _sha256(Path(manifest.script))
    except OSError as error:
        found.unknown["code.script-sha256"] = f"cannot read {manifest.script}: {error.strerror}"


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# -- the SIF ------------------------------------------------------------------------------


def _read_sif(
    manifest: Manifest,
    staged: Staged,
    environ: Mapping[str, str],
    found: _Gathered,
    probe: str,
    record_places: Sequence[Path],
) -> None:
    """Check the SIF, and only if it is the locked one start it to look inside.

    The file stays open from checking to starting: what runs is what was checked.
    """
    found.unknown["probe"] = "not read: the SIF could not be read"  # until it is
    path = staged.sif_path if staged.sif is not None else manifest.environment.sif
    try:
        # O_NONBLOCK: a FIFO in its place must not hold the node.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        found.unknown[_SIF] = f"cannot open {path}: {error.strerror}"
        return
    try:
        # Deeper levels ask for more than evidence from before: they read every byte.
        cheap = manifest.probe_level == "record" and manifest.sif is not None
        found.sif = sif_check.check(
            descriptor,
            path=path,
            staged=staged.sif is not None,
            known=(staged.sif or manifest.sif) if cheap else None,
            records=sif_check.node_records(record_places) if cheap else None,
        )
        found.values[_SIF] = found.sif.sha256
        if any(e.value != found.sif.sha256 for e in manifest.expectations if e.field == _SIF and e.severity == "must"):
            found.unknown["probe"] = SKIPPED
            return
        del found.unknown["probe"]
        _timed(found, "probe", lambda: _probe(manifest, staged, environ, found, probe, image_fd=descriptor))
        if not leads_to(found.sif, descriptor):
            # Apptainer opens the file by its name (node/door.py): what was probed may be another.
            found.values[_SIF], found.unknown["probe"] = "replaced while it was checked", SKIPPED
    finally:
        os.close(descriptor)


# -- inside the environment ---------------------------------------------------------------


def _probe(
    manifest: Manifest,
    staged: Staged,
    environ: Mapping[str, str],
    found: _Gathered,
    probe: str,
    *,
    image_fd: int | None,
) -> None:
    answer = run_probe(
        manifest.environment,
        environ,
        probe=probe,
        level=manifest.probe_level,
        seconds=manifest.check_seconds,
        variables={setting.name: setting.value for setting in manifest.settings},
        passed=manifest.pass_env,
        image=None if image_fd is None else f"/proc/self/fd/{image_fd}",
        pass_fds=() if image_fd is None else (image_fd,),
        binds=own_folders(manifest),
        data=data_binds(manifest, staged),
    )
    inside = read_answer(answer)
    found.values = inside.values | found.values
    found.unknown.update(inside.unknown)
    found.unlisted = inside.unlisted
    found.differences.extend(compare_packages(manifest.packages, answer, level=manifest.probe_level))


@dataclass(frozen=True, kw_only=True)
class Inside:
    """What a probe's answer says, in the words of the lockfile.

    Attributes:
        unknown: field -> why it could not be read.
        unlisted: the newest files that no package lists; see `wire.Facts`.
    """

    values: dict[str, Value]
    unknown: dict[str, str]
    unlisted: tuple[str, ...] = ()


def read_answer(answer: Mapping[str, Any]) -> Inside:
    """Return what `parse_probe` gave as fields: for the gate, and for whoever compares without one.

    Raises:
        ValueError: a value is of no kind that a lockfile has.
    """
    values = {name: _as_value(value) for name, value in answer["values"].items()}
    unknown = {name: str(reason) for name, reason in answer["unknown"].items()}
    for package in answer["packages"]:
        known, missing = _source(package)
        values.update(known)
        unknown.update(missing)
    newest = answer.get("unlisted-newest")
    names = newest[:_UNLISTED] if isinstance(newest, list) else ()
    return Inside(values=values, unknown=unknown, unlisted=tuple(str(name)[:_PATH] for name in names))


# The probe names no more; an image may hold another one.
_UNLISTED = 3
_PATH = 500


def _source(package: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, str]]:
    """Return where a package without a digest of its own comes from, and why that is not known.

    A commit, whether its tree was changed and how; the digest of its files where git does not tell.
    """
    tables = (package.get(name) for name in ("git", "direct-url", "files"))
    git, direct, files = (table if isinstance(table, dict) else {} for table in tables)
    told = {
        "commit-id": (direct.get("commit-id") or git.get("commit"), git),
        "dirty": (git.get("dirty"), git),
        "diff-sha256": (git.get("diff-sha256"), git),
        "files-sha256": (files.get("sha256"), files),
    }
    values: dict[str, Value] = {}
    unknown: dict[str, str] = {}
    for part, (value, where) in told.items():
        field = f"packages.{package['name']}.{part}"
        if isinstance(value, bool) or (isinstance(value, str) and value):
            values[field] = value
        elif where.get("reason"):
            unknown[field] = str(where["reason"])
    return values, unknown


def run_probe(
    environment: Environment,
    environ: Mapping[str, str],
    *,
    probe: str,
    level: str,
    seconds: float,
    variables: Mapping[str, str] | None = None,
    passed: Sequence[str] = (),
    image: str | None = None,
    pass_fds: tuple[int, ...] = (),
    binds: tuple[Bind, ...] = (),
    data: tuple[Bind, ...] = (),
) -> dict[str, Any]:
    """Run the probe inside an environment, as the ranks will enter it.

    Args:
        environment: what to enter.
        environ: the environment of this process.
        probe: source text of incontainer/probe.py.
        level: `record`, `full` or `deep`.
        seconds: time limit.
        variables: what the ranks will have set.
        passed: names of the job's own variables that they will see besides.
        image: path of the SIF if not the environment's own, with `pass_fds` for an open one.
        binds: folders that the ranks will see and that may hide parts of the image.
        data: copies of data folders, which win over all other binds.

    Raises:
        HpcenvError: it could not be started or did not end in time.
        ValueError: what it printed is not its record.
    """
    with tempfile.TemporaryDirectory(prefix="hpcenv-probe-", ignore_cleanup_errors=True) as home:
        entry = enter(
            environment,
            [environment.python, "-B", "-", "--level", level],
            # A folder that exists in every image: the probe needs none of its own.
            workdir="/",
            variables=variables or {},
            inherited=environ,
            passed=passed,
            image=image,
            home=home,
            binds=binds,
            data=data,
        )
        done = process.run(entry.argv, timeout=seconds, env=entry.env, stdin=probe, cwd=entry.cwd, pass_fds=pass_fds)
    return parse_probe(done.stdout, level=level)


def parse_probe(text: str, *, level: str) -> dict[str, Any]:
    """Return the probe's record: the last line of its output.

    Raises:
        ValueError: there is none, it has another schema or level, or lacks a part.
    """
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or (answer.get("schema"), answer.get("level")) != (1, level):
        raise ValueError(f"the probe answered {lines[-1][:200] if lines else ''!r}")
    parts = {"values": dict, "unknown": dict, "packages": list}
    broken = [part for part, kind in parts.items() if not isinstance(answer.get(part), kind)]
    if broken:
        raise ValueError(f"the probe's answer has no usable {', '.join(broken)}")
    return answer


def _as_value(value: object) -> Value:
    if isinstance(value, list):
        return tuple(str(item) for item in value)
    if isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(f"not a fact: {value!r}")


def compare_packages(
    locked: tuple[PackageExpectation, ...], answer: Mapping[str, Any], *, level: str
) -> list[Difference]:
    """Return how the installed distributions differ from the locked ones. Pure.

    The digests over all packages already tell *that* something differs; this tells what.
    """
    installed = {package["name"]: package for package in answer["packages"]}
    differences = []
    for package in locked:
        found = installed.pop(package.name, None)
        field_name = f"packages.{package.name}"
        if found is None:
            differences.append(Difference(field=field_name, locked=package.version, found="absent"))
        elif found["version"] != package.version:
            differences.append(Difference(field=field_name, locked=package.version, found=found["version"]))
        else:
            differences.extend(_compare_digests(package, found, level=level))
    differences.extend(
        Difference(field=f"packages.{name}", locked="absent", found=found["version"])
        for name, found in sorted(installed.items())
    )
    return differences


def _compare_digests(package: PackageExpectation, found: Mapping[str, Any], *, level: str) -> list[Difference]:
    name = f"packages.{package.name}"
    content, record = found.get("content-sha256"), found.get("record-sha256")
    if level != "record" and package.content_sha256 and content != package.content_sha256:
        note = _modified_note(found.get("modified") or [], found.get("modified-count"))
        return [_digest_difference(f"{name}.content-sha256", package.content_sha256, content, found, note)]
    if package.record_sha256 and record != package.record_sha256:
        return [_digest_difference(f"{name}.record-sha256", package.record_sha256, record, found)]
    return []


def _digest_difference(
    field_name: str, locked: str, digest: str | None, found: Mapping[str, Any], note: str = ""
) -> Difference:
    if digest:
        return Difference(field=field_name, locked=locked, found=digest, note=note)
    reason = str(found.get("reason") or "it has no digest")
    return Difference(field=field_name, locked=locked, found=reason, note=note, unknown=True)


def _modified_note(files: Sequence[Mapping[str, Any]], counted: int | None) -> str:
    count = len(files) if counted is None else counted
    named = ", ".join(str(file["path"]) for file in files[:3])
    more = f" and {count - 3} more" if count > 3 else ""
    return f"changed since installation: {named}{more}" if named else ""
