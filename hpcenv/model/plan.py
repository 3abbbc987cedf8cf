"""A plan: everything a submission will write and ask for, decided before anything is done.

Runs on: LOGIN NODE. Pure: `--dry-run` prints the plan that `submit` consumes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from hpcenv import wire
from hpcenv.dataclass import dataclass, field
from hpcenv.errors import UsageError
from hpcenv.model import sbatch
from hpcenv.model.project import time_minutes
from hpcenv.wire import Manifest


@dataclass(frozen=True, kw_only=True)
class Request:
    """What Slurm is asked for; names are sbatch's long options, None leaves it to Slurm.

    Attributes:
        gpus_per_node: per node, never the job's total.
        gpu_request: the form that this cluster accepts.
        gpu_type: as the GRES name it; None takes any.
    """

    nodes: int
    gpus_per_node: int
    nproc_per_node: int
    cpus_per_task: int | None = None
    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    dependency: str | None = None
    spare: int = 0
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    gpu_type: str | None = None

    @property
    def time_minutes(self) -> float | None:
        """The time limit in minutes, None when Slurm decides."""
        return None if self.time is None else time_minutes(self.time)

    @property
    def shape(self) -> str:
        """The shape in words, so that nobody takes per-node GPUs for the total."""
        ranks = self.nodes * self.nproc_per_node
        what = _plural(self.gpus_per_node, "GPU") if self.gpus_per_node else "no GPU"
        text = f"{_plural(self.nodes, 'node')} x {what}"
        if self.gpus_per_node != self.nproc_per_node:
            text += f", {_plural(self.nproc_per_node, 'rank')} each"
        return f"{text} = {_plural(ranks, 'rank')}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run that could be submitted.

    Attributes:
        manifest: what the nodes will read.
        request: what Slurm is asked for.
        script: the batch script, byte for byte; empty for `--cluster local`.
        lockfile_text: the lockfile's bytes as text, kept with the run.
        notes: what the user should know, one sentence each.
        asked: what Slurm is asked for, each with the origin of its value.
        command: the command line that makes this plan again.
        source: the copy of the code that the run uses, None where it runs from its own place.
        files: what else lies in the run folder: relative path -> content.
    """

    manifest: Manifest
    request: Request
    script: str
    lockfile_text: str
    command: tuple[str, ...]
    notes: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()
    source: PlannedSource | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedSource:
    """The copy of the code that `submit` will make.

    Attributes:
        record: what the manifest says of it.
        script: the script's place in the copy.
        files: paths relative to `record.root`; their content is that of the work tree.
        diff: how they differ from the commit; empty when they do not.
        new: those of `files` that git does not track.
    """

    record: wire.Source
    script: Path
    files: tuple[str, ...]
    diff: bytes = b""
    new: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Call:
    """A Python function that every rank calls, instead of a script.

    Attributes:
        name: of the function, for people and for the run's name.
        script: what torchrun starts; relative to the run folder, and among `files`.
        files: path relative to the run folder -> content.
        spec: what `script` must know besides: it goes to call.json beside it, with `file`,
            the place of `module` as the ranks see it.
        module: the file that holds the function; None where it holds nothing to copy.
    """

    name: str
    script: str
    files: Mapping[str, bytes]
    spec: Mapping[str, str]
    module: Path | None = None


def render_script(
    template: str,
    manifest: Manifest,
    request: Request,
    *,
    python: str,
    command: tuple[str, ...],
    replaced: Mapping[str, str] | None = None,
) -> str:
    """Return the batch script of a run. Pure.

    Args:
        template: text of sbatch_templates/job.sbatch or the user's own.
        python: interpreter on the nodes for hpcenv's own steps: the one that submits.
        command: goes into the header as a comment.
        replaced: hole -> what stands there instead of the value that follows from the manifest.
    """
    values: dict[str, str] = {
        "run": sbatch.comment(manifest.run),
        "command": sbatch.comment(sbatch.options(command)),
        "directives": sbatch.directives(directives_of(manifest, request)),
        "run_folder": manifest.run_folder,
        "python": python,
        "launches": "yes" if manifest.script else "no",
        "check_options": sbatch.options(_check_options(manifest, request)),
        "launch_options": sbatch.options(_launch_options(manifest, request)),
    }
    values |= replaced or {}
    parts: list[str] = []
    if manifest.modules:
        parts.append("modules")
        values["modules"] = sbatch.options(manifest.modules)
    if manifest.stage is not None:
        parts.append("stage")
        values["stage_options"] = sbatch.options(_stage_options(manifest, request))
    return sbatch.render(template, values, parts=parts)


def directives_of(manifest: Manifest, request: Request) -> list[tuple[str, str | None]]:
    """Return the `#SBATCH` lines of a run: option and value, None for one without."""
    run = wire.RunFolder(_path(manifest.run_folder))
    asked: list[tuple[str, str | None]] = [
        ("job-name", manifest.run),
        ("nodes", str(request.nodes + request.spare)),
        ("ntasks-per-node", "1"),
    ]
    for name in _AS_ASKED:
        value = getattr(request, name)
        if value is not None:
            asked.append((name.replace("_", "-"), str(value)))
    asked.extend(_gpu_directive(request))
    return [
        *asked,
        ("chdir", manifest.run_folder),
        # One file for the job's whole story; a requeued job goes on in the same file.
        ("output", sbatch.filename_pattern(str(run.log))),
        ("open-mode", "append"),
        ("export", "ALL"),
        *_stop_directives(manifest),
        # A step must not start while a node is still booting or cleaning up.
        ("wait-all-nodes", "1"),
    ]


_AS_ASKED = (
    *("cpus_per_task", "mem", "time", "partition", "account", "qos", "constraint", "reservation", "exclude"),
    *("nodelist", "dependency"),
)


def _stop_directives(manifest: Manifest) -> list[tuple[str, str | None]]:
    """Ask for a warning before the end, and to be queued again after a preemption or a node's failure."""
    # Without `B:` the signal goes to the job steps only: the batch shell waits for them.
    warning = [("signal", f"USR2@{manifest.stop.grace}")] if manifest.script and manifest.stop.grace else []
    return [*warning, ("no-requeue" if manifest.stop.requeue == "never" else "requeue", None)]


def _gpu_directive(request: Request) -> list[tuple[str, str | None]]:
    if request.gpus_per_node == 0:
        return []
    count = f"{request.gpu_type}:{request.gpus_per_node}" if request.gpu_type else str(request.gpus_per_node)
    return [("gres", f"gpu:{count}") if request.gpu_request == "gres" else ("gpus-per-node", count)]


def _check_options(manifest: Manifest, request: Request) -> list[str]:
    minutes = -(-manifest.check_seconds // 60) + 2
    return [
        *_on_all_nodes(request),
        *_cpus(request),
        "--kill-on-bad-exit=0",
        f"--time={minutes}",
        "--job-name=check",
    ]


def _stage_options(manifest: Manifest, request: Request) -> list[str]:
    assert manifest.stage is not None
    total = manifest.stage.sif_size + sum(folder.unpacked for folder in manifest.stage.data)
    return [
        *_on_all_nodes(request),
        *_cpus(request),
        "--kill-on-bad-exit=0",
        # At 20 MB/s: a file system that is slower than that gives nothing to a job.
        f"--time={10 + total // (20 * 10**6 * 60)}",
        "--job-name=stage",
    ]


def _launch_options(manifest: Manifest, request: Request) -> list[str]:
    return [
        f"--nodes={request.nodes}",
        f"--ntasks={request.nodes}",
        "--ntasks-per-node=1",
        # A file with the nodes that the decide step chose: srun reads one where there is a slash.
        *([f"--nodelist={wire.RunFolder(_path(manifest.run_folder)).launched}"] if request.spare else []),
        *_cpus(request),
        "--kill-on-bad-exit=1",
        "--wait=60",
        "--unbuffered",
        "--job-name=launch",
    ]


def _on_all_nodes(request: Request) -> list[str]:
    nodes = request.nodes + request.spare
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]


def _cpus(request: Request) -> list[str]:
    return [] if request.cpus_per_task is None else [f"--cpus-per-task={request.cpus_per_task}"]


def _path(text: str) -> Path:
    if "\n" in text or "\0" in text:
        raise UsageError(f"the run folder {text!r} holds a newline")
    return Path(text)
