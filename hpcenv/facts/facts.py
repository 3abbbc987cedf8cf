"""Facts of one node: the identity of the SIF, the content of the environment, and the host.

Runs on: COMPUTE NODE. Each part is independent. If a part fails, its facts are `unknown`, with a reason, and the facts
of the other parts are kept.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcenv.container import bare_image
from hpcenv.container.start_command import let_through, needed_binds, own_folders, record_variables
from hpcenv.container.start_gate import is_unchanged, leads_to
from hpcenv.errors import EnvironmentUnreadable, HpcenvError, ToolFailed
from hpcenv.facts import host_checks, places
from hpcenv.facts.probe import read_answer, read_cuda_compat, read_image_network, read_look, run_probe
from hpcenv.identity import bind_content, code, data, mounts, overlay_check, sif_check
from hpcenv.identity.stage.staged import data_binds, staged_here
from hpcenv.incontainer.probe.rules import has_rule
from hpcenv.judge.job_variables import is_compared_as_variable, set_by_others
from hpcenv.machine import gpus, host, rank_cpus
from hpcenv.machine.gpus import GpuFacts
from hpcenv.machine.network import reach
from hpcenv.machine.network.detect import detect
from hpcenv.machine.this_node import ThisNode
from hpcenv.machine.tree import HostTree
from hpcenv.records.checked_sif import CheckedSif
from hpcenv.records.checks import NodeChecks
from hpcenv.records.codec import SCHEMA
from hpcenv.records.facts import (
    SKIPPED,
    SKIPPED_FOR_OVERLAY,
    CudaCompat,
    Difference,
    Facts,
    Look,
    Network,
    RankCpus,
    Staged,
)
from hpcenv.records.files import sha256_at
from hpcenv.records.manifest import (
    Manifest,
    Overlay,
    PackageExpectation,
    RecordedData,
    Setting,
    SifIdentity,
    Source,
    Value,
)
from hpcenv.records.network import Fabric, ImageNetwork
from hpcenv.records.package_fields import package_field
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.variables import is_tuning, recorded_value

_SIF = "container.sif.sha256"
_HOOK = "code.start-hook-sha256"
_OVERLAY = "container.overlay.sha256"
_NO_SIF = "not read: the SIF could not be read"
_BIND_CONTENT = "container.bind-content"


class _Gathered:
    """The facts that were read so far. At the end, a record `Facts` is made from these facts."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.unknown: dict[str, str] = {}
        self.differences: list[Difference] = []
        self.unlisted: tuple[str, ...] = ()
        self.seconds: dict[str, float] = {}
        self.sif: CheckedSif | None = None
        self.look: Look | None = None
        self.overlay: CheckedSif | None = None
        self.image_network: ImageNetwork | None = None
        self.cuda_compat: CudaCompat | None = None
        self.others: dict[str, str] = {}
        self.of_image: tuple[str, ...] = ()


def gather(
    manifest: Manifest,
    place: ThisNode,
    environ: Mapping[str, str],
    *,
    probe: str,
    record_places: Sequence[Path] = sif_check.NODE_PLACES,
) -> Facts:
    """Return all facts of this node and of the environment on it.

    Args:
        manifest: the run.
        place: this node.
        environ: the environment variables of the step.
        probe: the text of the probe program (probe_source.py).
        record_places: folders in which this node may keep hashes of files that it has read.
    """
    found = _Gathered()
    look = places.start(manifest, environ)
    outside = _Outside(manifest, place, environ, look)
    outside.start()
    staged = staged_here(manifest, place)
    _timed(found, "script", lambda: _read_script(manifest, found), look.within(manifest.script))
    if manifest.environment.kind == "sif":
        sif = staged.sif_path if staged.sif is not None else manifest.environment.sif
        found.unknown["probe"] = _NO_SIF  # removed as soon as the SIF was read
        _timed(
            found,
            "sif",
            lambda: _read_sif(manifest, staged, environ, found, probe, record_places),
            look.within(sif),
        )
    else:
        python = look.within(manifest.environment.python)
        _timed(found, "probe", lambda: _probe(manifest, staged, environ, found, probe, image_fd=None), python)
    outside.join()
    variables = record_variables(manifest, environ)
    found.values |= _read_variables(manifest, variables, outside.network)
    # The node's own name in a value, for example in the path of a scratch folder, must not count as a difference.
    found.values |= {f"env.{name}": value.replace(place.node, "NODE") for name, value in found.others.items()}
    return Facts(
        schema=SCHEMA,
        run=manifest.run,
        node=place.node,
        attempt=place.attempt,
        network=outside.network,
        # If environment and host report the same field, the host's value is used. So the environment cannot change it.
        values=found.values | outside.found.values,
        unknown=found.unknown | outside.found.unknown,
        differences=tuple(found.differences),
        unlisted=found.unlisted,
        sif=found.sif,
        overlay=found.overlay,
        look=found.look,
        not_staged=staged.problems,
        variables=(*variables, *_of_others(found)),
        fabric=outside.fabric,
        image_network=found.image_network,
        cuda_compat=found.cuda_compat,
        checks=outside.checks,
        rank_cpus=outside.rank_cpus,
        seconds={
            **outside.found.seconds,
            **found.seconds,
            **{f"stage {part}": took for part, took in staged.seconds.items()},
        },
        written=time.time(),
    )


def _timed(found: _Gathered, name: str, part: Callable[[], None], before: Callable[[], None] | None = None) -> None:
    started = time.monotonic()
    try:
        if before is not None:
            before()
        part()
    except Exception as error:  # noqa: BLE001  (no error may hide the results of other parts)
        found.unknown[name] = _reason(error)
    found.seconds[name] = round(time.monotonic() - started, 3)


def _reason(error: Exception) -> str:
    """Return the text of an error for one cell of the verdict's table."""
    if not isinstance(error, HpcenvError):
        return f"{type(error).__name__}: {error}"
    if isinstance(error, ToolFailed):
        # The `why` of this error is the whole command line, which is too long for a table.
        detail = _cause_in(error.stderr) or getattr(error.__cause__, "strerror", None)
        return f"{error.what}: {detail}" if detail else error.what
    return f"{error.what}: {error.why}" if error.why else error.what


def _cause_in(stderr: str) -> str:
    """Return the reason for a program's failure: Python's fatal error, the last exception, or the last line."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    fatal = [line for line in lines if line.startswith("Fatal Python error")][:1]
    raised = [line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception): ", line)][-1:]
    return "; ".join(fatal + raised if fatal else raised or lines[-1:])


# -- the host -----------------------------------------------------------------------------


class _Outside(threading.Thread):
    """Reads host and network in a thread, at the same time as the step reads the SIF and the container.

    A driver may take seconds to answer. The Python modules for this work are also loaded in this thread.

    Attributes:
        found, network, fabric, checks, rank_cpus: the results. Do not read the results before the thread has ended.
    """

    def __init__(
        self, manifest: Manifest, place: ThisNode, environ: Mapping[str, str], look: places.FolderLook
    ) -> None:
        # The thread is a daemon thread. So a step that must end does not wait for a driver.
        super().__init__(name="hpcenv-outside", daemon=True)
        self.found = _Gathered()
        self.network = Network(first_node=place.nodes[0])
        self.fabric: Fabric | None = None
        self.checks: NodeChecks | None = None
        self.rank_cpus: RankCpus | None = None
        self._gpus: GpuFacts | None = None
        self._look = look
        self._manifest = manifest
        self._place = place
        self._environ = environ

    def run(self) -> None:
        _timed(self.found, "host", self._read_host)
        _timed(self.found, "network", self._observe)
        _timed(self.found, "fabric", self._detect)
        if self._manifest.gpus_per_node and self._manifest.launch.cpu_binding == "near-gpu":
            self._choose_cpus()
        if self._manifest.preflight.level != "off":
            _timed(self.found, "preflight", self._run_checks)
        _read_copy_and_data(self._manifest, self.found, self._look)
        if "network" in self.found.unknown:
            self.network = replace(self.network, problem=self.found.unknown["network"])

    def _read_host(self) -> None:
        self._gpus = _read_host(self.found, self._environ, self._manifest.environment.apptainer)

    def _observe(self) -> None:
        # If spare nodes replace the first nodes of the list, one of these nodes becomes the first node.
        others = self._place.nodes[1 : 1 + self._manifest.spare]
        host = self._manifest.rendezvous_host
        self.network = reach.observe(self._place.nodes[0], self._environ, others=others, host=host)

    def _run_checks(self) -> None:
        seen = host_checks.AlreadyRead(gpus=self._gpus, network=self.network, fabric=self.fabric, look=self._look)
        self.checks = host_checks.run(self._manifest, self._place, self._environ, seen)

    def _detect(self) -> None:
        self.fabric = detect(HostTree(), self._environ, gpus=() if self._gpus is None else self._gpus.places)

    def _choose_cpus(self) -> None:
        view = rank_cpus.HostView(gpus=self._gpus, fabric=self.fabric, allowed=os.sched_getaffinity(0))
        try:
            self.rank_cpus = rank_cpus.choose(self._manifest, self._environ, view, HostTree())
        except (OSError, ValueError) as error:
            self.rank_cpus = RankCpus(why=str(error))


def _read_host(found: _Gathered, environ: Mapping[str, str], apptainer: str) -> GpuFacts:
    """Read the facts of the host, and return what is known about its GPUs."""
    found.values["host.hostname"] = os.uname().nodename
    found.values["host.machine"] = os.uname().machine
    found.values["host.cpus"] = len(os.sched_getaffinity(0))
    of_gpus = gpus.read(environ=environ)
    for part in (of_gpus, host.read(host.Host(environ=environ, apptainer=apptainer or "apptainer"))):
        found.values.update(part.values)
        found.unknown.update(part.unknown)
    return of_gpus


def _read_script(manifest: Manifest, found: _Gathered) -> None:
    """Hash the script as this node reads it. The hash shows a stale cache, or a path that is local to a node."""
    if not manifest.script:
        return
    try:
        found.values["code.script-sha256"] = sha256_at(manifest.script)
    except OSError as error:
        found.unknown["code.script-sha256"] = f"cannot read {manifest.script}: {error.strerror}"


def _read_variables(manifest: Manifest, variables: Sequence[Setting], seen: Network) -> dict[str, Value]:
    """Return `env.NAME` -> value, for each variable that the ranks get and that is compared.

    As at the launch, the settings of the run replace other values. A locked variable that the ranks do not get is
    `absent`.
    """
    locked: dict[str, Value] = {e.field: "absent" for e in manifest.expectations if e.field.startswith("env.")}
    inherited = {v.name: v.value for v in variables if is_compared_as_variable(v.name)}
    chosen = {s.name: recorded_value(s.name, s.value) for s in (*seen.variables, *manifest.settings)}
    return locked | {f"env.{name}": value for name, value in (inherited | chosen).items()}


def _of_others(found: _Gathered) -> tuple[Setting, ...]:
    """Return the variables in the environment that neither hpcenv nor the image has set, for the verdict."""
    origin = "seen in the environment; hpcenv did not set it"
    others = {name: value for name, value in sorted(found.others.items()) if name not in found.of_image}
    return tuple(Setting(name=name, value=value, origin=origin) for name, value in others.items())


def _read_copy_and_data(manifest: Manifest, found: _Gathered, look: places.FolderLook) -> None:
    """Read the run's copy of the code, and the data that the run names."""
    source = manifest.source
    if manifest.launches and source is not None and source.digest:
        run = RunFolder(Path(manifest.run_folder))
        _timed(found, "code.digest", lambda: found.values.update(_read_copy(manifest, source, run)))
    if manifest.launches and manifest.start_hook_sha256:
        hook = RunFolder(Path(manifest.run_folder))
        _timed(found, _HOOK, lambda: found.values.update({_HOOK: code.find_hook_digest(hook)}))
    for one in manifest.data:
        folders = not one.hub and has_rule("empty-folders", manifest.environment.revision)
        read = functools.partial(_read_data, one, found, folders)
        _timed(found, f"data.{one.name}", read, look.within(one.path))


def _read_copy(manifest: Manifest, source: Source, run: RunFolder) -> dict[str, Value]:
    digest = code.find_digest(source, run, "new-modules" if manifest.setup else "all")
    return {"code.digest": digest, "code.changed": code.left_changed(run)}


def _read_data(one: RecordedData, found: _Gathered, folders: bool) -> None:
    found.values[f"data.{one.name}"] = str(data.read_state(one.path, one.compare, folders=folders))


# -- the SIF ------------------------------------------------------------------------------


def _read_sif(
    manifest: Manifest,
    staged: Staged,
    environ: Mapping[str, str],
    found: _Gathered,
    probe: str,
    record_places: Sequence[Path],
) -> None:
    """Check whether the file is the locked SIF. If it is, start the SIF and read the environment in it.

    The file stays open from the check to the start. So exactly the checked file is started.
    """
    path = staged.sif_path if staged.sif is not None else manifest.environment.sif
    try:
        # O_NONBLOCK: if the path is a FIFO, opening it must not block.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        found.unknown[_SIF] = f"cannot open {path}: {error.strerror}"
        return
    try:
        # Only the level `record` uses earlier hashes. The other levels read every byte.
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
        overlay = manifest.environment.overlay
        if overlay is not None and not _read_overlay(manifest, overlay, found, record_places):
            return
        _timed(found, "probe", lambda: _probe(manifest, staged, environ, found, probe, image_fd=descriptor))
        if not leads_to(found.sif, descriptor):
            # Apptainer opens the file by its name (container/start_gate.py), so it may have probed another file.
            found.values[_SIF], found.unknown["probe"] = "replaced while it was checked", SKIPPED
        elif found.overlay is not None and not is_unchanged(found.overlay):
            found.values[_OVERLAY], found.unknown["probe"] = "replaced while it was checked", SKIPPED_FOR_OVERLAY
    finally:
        os.close(descriptor)


def _read_overlay(manifest: Manifest, overlay: Overlay, found: _Gathered, record_places: Sequence[Path]) -> bool:
    """Check the overlay, and return whether it may be mounted. Only programs of the locked overlay may be started."""
    found.unknown["probe"] = SKIPPED_FOR_OVERLAY  # removed if the overlay is the locked one
    started = time.monotonic()
    try:
        known = manifest.overlay_file if manifest.probe_level == "record" else None
        found.overlay = _check_overlay_file(overlay.source, known, record_places)
    except (HpcenvError, OSError, ValueError) as error:
        found.unknown[_OVERLAY] = f"cannot read {overlay.source}: {_reason_of_file(error)}"
        return False
    finally:
        found.seconds["overlay"] = round(time.monotonic() - started, 3)
    found.values[_OVERLAY] = found.overlay.sha256
    locked = [e for e in manifest.expectations if e.field == _OVERLAY and e.severity == "must"]
    if any(e.value != found.overlay.sha256 for e in locked):
        return False
    del found.unknown["probe"]
    return True


def _check_overlay_file(path: str, known: SifIdentity | None, record_places: Sequence[Path]) -> CheckedSif:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        records = sif_check.node_records(record_places) if known is not None else None
        return overlay_check.check_file(descriptor, path=path, known=known, records=records)
    finally:
        os.close(descriptor)


def _reason_of_file(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else _reason(error)


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
    # The ranks also get the job's variables that tune communication (judge/network/decision.py).
    variables = {name: value for name, value in environ.items() if is_tuning(name)}
    variables |= {setting.name: setting.value for setting in manifest.settings}
    answer = run_probe(
        manifest.environment,
        environ,
        probe=probe,
        level=manifest.probe_level,
        seconds=manifest.check_seconds,
        variables=variables,
        passed=manifest.pass_env,
        image=None if image_fd is None else f"/proc/self/fd/{image_fd}",
        pass_fds=() if image_fd is None else (image_fd,),
        binds=own_folders(manifest),
        data=data_binds(manifest, staged),
    )
    if image_fd is not None:
        try:
            found.values |= _read_mounts(manifest, staged, environ, answer, image_fd)
        except (HpcenvError, OSError, ValueError) as error:
            found.unknown["container.mounts"] = _reason(error)
    _read_bind_content(manifest, found)
    inside = read_answer(answer)
    if "python.version" in inside.unknown and not inside.values:
        # Every Python reports its version. So if there is no version, the probe itself has failed.
        reason, _ = Counter(inside.unknown.values()).most_common(1)[0]
        raise EnvironmentUnreadable("nothing inside could be read", why=reason)
    found.values = inside.values | found.values
    found.unknown.update(inside.unknown)
    given = let_through(environ, manifest.pass_env, on_host=image_fd is None) | variables
    seen, of_image = answer.get("environ"), answer.get("image-variables")
    all_seen = {str(name): str(value) for name, value in seen.items()} if isinstance(seen, dict) else {}
    found.others = {name: recorded_value(name, value) for name, value in set_by_others(all_seen, given).items()}
    found.of_image = tuple(str(name) for name in of_image) if isinstance(of_image, list) else ()
    found.unlisted = inside.unlisted
    found.look = read_look(answer)
    found.image_network = read_image_network(answer)
    found.cuda_compat = read_cuda_compat(answer)
    found.differences.extend(compare_packages(manifest.packages, answer, level=manifest.probe_level))


def _read_mounts(
    manifest: Manifest, staged: Staged, environ: Mapping[str, str], answer: Mapping[str, Any], image_fd: int
) -> dict[str, Value]:
    """Return two fields: missing mounts with unlocked mounts over code or the overlay; and all other unlocked mounts.

    Raises:
        HpcenvError, OSError, ValueError: the mounts cannot be read.
    """
    environment = manifest.environment
    inside = mounts.parse_mountinfo(str(answer.get("mountinfo", "")))
    on_node = mounts.parse_mountinfo(Path("/proc/self/mountinfo").read_text("utf-8", "backslashreplace"))
    overlay = environment.overlay
    own = (*data_binds(manifest, staged), *environment.binds)
    asked = needed_binds((*own, *own_folders(manifest)))
    gpus = environment.gpus or environment.rocm
    others = mounts.unexplained(inside, asked, on_node, gpus=gpus, overlay=overlay)
    over = mounts.over_overlay(inside, overlay, gpus=gpus)
    shown = {mount.target: f"{mount.target} ({mount.fs_type}: {mount.root})" for mount in (*others, *over)}
    shown |= {target: f"{target} (bind)" for target in manifest.unlocked_binds}
    # `bare_image` starts the image without the overlay, so it cannot see which files of the overlay are hidden.
    hiding = [target for target in shown if mounts.is_over_overlay(target, overlay)]
    shown |= {target: f"{shown[target]}, hides a part of the overlay" for target in hiding}
    others_at = tuple(target for target in shown if target not in hiding)
    counted = hiding + list(
        bare_image.paths_with_code(
            environment, others_at, environ, image=f"/proc/self/fd/{image_fd}", pass_fds=(image_fd,)
        )
    )
    absent = [f"{target} (asked for, not mounted)" for target in mounts.missing(inside, asked, on_node)]
    if overlay is not None and not mounts.shows_overlay(inside, overlay):
        absent.append(f"{overlay.target} (the overlay, not mounted)")
    return {
        "container.mounts": tuple(sorted([*(shown[target] for target in counted), *absent])),
        "container.mounts-elsewhere": tuple(sorted(shown[target] for target in shown if target not in counted)),
    }


def _read_bind_content(manifest: Manifest, found: _Gathered) -> None:
    """Read the content of the locked binds that hide files of the image or contain code."""
    locked = next((e.value for e in manifest.expectations if e.field == _BIND_CONTENT), ())
    sources = {os.path.normpath(bind.target): bind.source for bind in reversed(manifest.environment.binds)}
    compiled = not has_rule("path-binds", manifest.environment.revision)
    contents = []
    for text in locked if isinstance(locked, tuple) else ():
        target = text.rpartition(" ")[0]
        _, source = bind_content.source_of(target, sources)
        if not source:
            continue
        try:
            contents.append(f"{target} {bind_content.content_digest(source, compiled=compiled)}")
        except (OSError, ValueError) as error:
            found.unknown[_BIND_CONTENT] = _reason(error)
    if locked:
        found.values[_BIND_CONTENT] = tuple(contents)


def compare_packages(
    locked: tuple[PackageExpectation, ...], answer: Mapping[str, Any], *, level: str
) -> list[Difference]:
    """Return how the installed distributions differ from the locked distributions. Pure.

    The digests over all packages show only that something differs. This function shows which packages differ. If the
    packages could not be read, their count is unknown, and the result is empty.
    """
    if "packages.count" in answer.get("unknown", {}):
        return []
    # A package without a reason gets the reason why the content of all packages could not be read.
    unread = answer.get("unknown", {}).get("packages.content-digest")
    installed = {package["name"]: {"reason": unread, **_known(package)} for package in answer["packages"]}
    differences = []
    for package in locked:
        found = installed.pop(package.name, None)
        field_name = package_field(package.name)
        if found is None:
            differences.append(Difference(field=field_name, locked=package.version, found="absent"))
        elif found["version"] != package.version:
            differences.append(Difference(field=field_name, locked=package.version, found=found["version"]))
        else:
            differences.extend(_compare_digests(package, found, level=level))
    differences.extend(
        Difference(field=package_field(name), locked="absent", found=found["version"])
        for name, found in sorted(installed.items())
    )
    return differences


def _known(package: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in package.items() if value is not None}


def _compare_digests(package: PackageExpectation, found: Mapping[str, Any], *, level: str) -> list[Difference]:
    name = f"packages.{package.name}"
    content, record = found.get("content-sha256"), found.get("record-sha256")
    if level != "record" and package.content_sha256 and content != package.content_sha256:
        note = _modified_note(found.get("modified") or [], found.get("modified-count"))
        return [_digest_difference(f"{name}.content-sha256", package.content_sha256, content, found, note)]
    programs = found.get("programs") or {}
    if level != "record" and package.programs_sha256 and programs.get("sha256") != package.programs_sha256:
        note = _modified_note([{"path": f"bin/{name}"} for name in programs.get("modified") or ()], None)
        return [
            _digest_difference(f"{name}.programs-sha256", package.programs_sha256, programs.get("sha256"), found, note)
        ]
    if package.record_sha256 and record != package.record_sha256:
        return [_digest_difference(f"{name}.record-sha256", package.record_sha256, record, found)]
    if record and not package.record_sha256:
        # This also changes the digest over all packages, and each such difference must have a row.
        return [Difference(field=f"{name}.record-sha256", locked="absent", found=record)]
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
