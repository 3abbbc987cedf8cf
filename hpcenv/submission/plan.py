"""A plan: everything that a submission will write and request. The plan is complete before anything is done.

Runs on: LOGIN NODE. Pure. `--dry-run` prints the same plan that `submit` carries out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hpcenv.errors import UsageError
from hpcenv.judge import gpu_start
from hpcenv.judge.checks.check_table import at_level
from hpcenv.project import native_options
from hpcenv.project.duration import time_minutes
from hpcenv.project.option_types import WrittenOptions
from hpcenv.project.options import WRITTEN
from hpcenv.project.template import built_in
from hpcenv.records.code_listing import Listing
from hpcenv.records.manifest import Manifest, SmokeOptions, Source
from hpcenv.records.request import RequestRecord
from hpcenv.records.run_folder import RunFolder
from hpcenv.steps.run_tasks import SECONDS_FOR_SLOWER_NODES
from hpcenv.submission import batch_script
from hpcenv.submission.hub_cache import HubCache
from hpcenv.text import Shown, plural


@dataclass(frozen=True, kw_only=True)
class Request(WrittenOptions):
    """The request to Slurm. If a value is None, Slurm decides.

    Attributes:
        gpus_per_node: the number of GPUs on each node, never the total of the job.
        gpu_request: the option for GPUs that this cluster accepts.
        gpu_type: the name of the GPU type in the GRES; None accepts any type.
        comment: the user's own comment of the job; None if the user gave no comment.
        fingerprint: the fingerprint of the lockfile, for the job's comment; empty if it is not known.
        rocm: whether the container needs ROCm's libraries of the host.
        expedite: whether Slurm starts the job before other jobs if it queues the job again after a node failure.
        sbatch: name -> value of the options that are passed on to sbatch. The value is None for an option without a
            value.
        srun: the options that are passed on to the srun of the launch step, in the same form as `sbatch`.
    """

    nodes: int
    gpus_per_node: int
    nproc_per_node: int
    cpus_per_task: int | None = None
    spare: int = 0
    gpu_request: Literal["gpus-per-node", "gres"] = "gpus-per-node"
    gpu_type: str | None = None
    comment: str | None = None
    fingerprint: str = ""
    rocm: bool = False
    expedite: bool = False
    sbatch: Mapping[str, str | None] = field(default_factory=dict)
    srun: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def time_minutes(self) -> float | None:
        """The time limit in minutes; None if Slurm decides."""
        return None if self.time is None else time_minutes(self.time)

    @property
    def shape(self) -> str:
        """The numbers of nodes, GPUs per node and ranks, in words."""
        ranks = self.nodes * self.nproc_per_node
        what = plural(self.gpus_per_node, "GPU") if self.gpus_per_node else "no GPU"
        text = f"{plural(self.nodes, 'node')} x {what}"
        if self.gpus_per_node != self.nproc_per_node:
            text += f", {plural(self.nproc_per_node, 'rank')} each"
        return f"{text} = {plural(ranks, 'rank')}"


@dataclass(frozen=True, kw_only=True)
class EarlierRuns:
    """The runs of `--after`: they must complete before the planned run starts.

    Attributes:
        names: the names of the folders of all these runs.
        going: folders of the runs that have not ended.
        on_slurm: job ids of the runs in `going` that are in Slurm; for a sweep, the id of its array.
        waited_for: folders of the runs for which `submit` itself waits.
    """

    names: tuple[str, ...] = ()
    going: tuple[Path, ...] = ()
    on_slurm: tuple[str, ...] = ()
    waited_for: tuple[Path, ...] = ()


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Shown):
    """A run that can be submitted.

    Attributes:
        manifest: the manifest of the run, which the nodes read.
        request: what is requested from Slurm.
        script: the batch script, byte for byte; empty for `--cluster local`.
        lockfile_text: the text of the lockfile. The run folder gets a copy.
        requirements: the packages of the lockfile in a form for pip. The run folder gets a copy.
        notes: information for the user, one sentence each.
        requested: the values of the request to Slurm, each with its origin.
        command: the command line that makes this plan again.
        source: the copy of the code that the run uses; None if the code runs in the live project.
        record: the stored request, which `hpcenv rerun` reads; None if the run cannot be submitted again.
        files: more files for the run folder: relative path -> content.
        hub: the cache that has the run's models and data sets of a hub.
        after: the runs that must complete first. Slurm itself waits for the runs that are Slurm jobs.
        secret_values: variable of this process -> value, for the file of secrets that the nodes read.
    """

    manifest: Manifest
    request: Request
    script: str
    lockfile_text: str
    command: tuple[str, ...]
    requirements: str = ""
    notes: tuple[str, ...] = ()
    requested: tuple[str, ...] = ()
    record: RequestRecord | None = None
    source: PlannedSource | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    hub: HubCache = field(default_factory=HubCache)
    after: EarlierRuns = EarlierRuns()
    secret_values: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, kw_only=True)
class PlannedSource:
    """The copy of the code that `submit` will make.

    Attributes:
        record: the description of the copy in the manifest.
        script: the path of the script in the copy; None if the run has no file of code.
        files: path in the run folder -> the file to copy.
        texts: path -> content, for files that may change at any time. The copy gets the content that was read once.
        listing: the list of all paths in the copy. A path that is not in `files` is a link.
        workdir: the working directory, relative to the run folder.
        roots: name of a folder in the run folder -> the original folder of this copy, links resolved.
        live_folders: folders that this submission makes in the project.
        diff: the difference between the tracked files and the commit; empty if there is no difference.
        new: the script, if git does not track it.
        has_submodules: whether the work tree has submodules with files in the copy.
    """

    record: Source
    script: Path | None
    files: Mapping[str, str]
    texts: Mapping[str, bytes]
    listing: Listing
    workdir: str
    roots: Mapping[str, str]
    live_folders: tuple[str, ...] = ()
    diff: bytes = b""
    new: tuple[str, ...] = ()
    has_submodules: bool = False


@dataclass(frozen=True, kw_only=True)
class Call:
    """A Python function that every rank or task calls, instead of a script.

    Attributes:
        name: the name of the function, which is also the name of the run.
        script: the file that torchrun starts: one of `files`, relative to the run folder.
        files: path relative to the run folder -> content.
        spec: the content of call.json, which `script` reads. call.json has also the key `file`: the path at which the
            ranks find `module`.
        module: the file that defines the function; None if this file is not copied.
        folder: the folder for the pickles of the function and of its results.
        outputs: a folder to which the function writes. This folder has no code.
        launcher: the program that starts the processes for the function; see `LaunchOptions`.
    """

    name: str
    script: str
    files: Mapping[str, bytes]
    spec: Mapping[str, object]
    module: Path | None = None
    folder: Path | None = None
    outputs: Path | None = None
    launcher: Literal["torchrun", "tasks"] = "torchrun"

    @property
    def folders(self) -> tuple[Path, ...]:
        """More folders, without code, that every node must see."""
        return tuple(folder for folder in (self.folder, self.outputs) if folder is not None)


def render_script(
    manifest: Manifest,
    request: Request,
    *,
    python: str,
    command: tuple[str, ...],
    replaced: Mapping[str, str] | None = None,
) -> str:
    """Return the batch script of a run, made from sbatch_templates/job.sbatch.

    Args:
        manifest: the run.
        request: what is requested from Slurm.
        python: the Python interpreter for hpcenv's steps on the nodes. The same interpreter submits the run.
        command: the command line, for a comment at the top of the script.
        replaced: name of a placeholder of the template -> text that replaces the value from the manifest.
    """
    values: dict[str, str] = {
        "run": batch_script.comment(manifest.run),
        "command": batch_script.comment(batch_script.options(command)),
        "directives": batch_script.directives(directives_of(manifest, request)),
        "run_folder": manifest.run_folder,
        "python": python,
        "check": batch_script.options(_check_options(manifest, request)),
    }
    values |= replaced or {}
    parts = {name: batch_script.options(words) for name, words in _parts(manifest, request).items()}
    if manifest.setup:
        parts["setup"] = batch_script.lines(manifest.setup)
    template = built_in("job.sbatch").read_text(encoding="utf-8")
    return batch_script.render(template, values | parts, parts=(*parts, "launch" if manifest.launches else "verify"))


def _parts(manifest: Manifest, request: Request) -> dict[str, Sequence[str]]:
    """Return the parts of the template that this run needs: name of a placeholder in the part -> its words."""
    parts: dict[str, Sequence[str]] = {}
    if manifest.modules:
        parts["modules"] = module_words(manifest)
    if manifest.unset:
        parts["unset"] = manifest.unset
    if manifest.stage is not None:
        parts["stage"] = _stage_options(manifest, request)
    if at_level(manifest.preflight, gpus=manifest.gpus_per_node > 0, places=("container",)):
        parts["inside"] = _inside_options(manifest, request, "inside")
    if not manifest.launches and gpu_start.wanted(manifest, None):
        parts["gpus"] = _inside_options(manifest, request, "gpus")
    if manifest.smoke is not None:
        parts["smoke"] = _smoke_options(manifest, request, manifest.smoke)
    if manifest.launches:
        parts["launch"] = _launch_options(manifest, request)
    return parts


def module_words(manifest: Manifest) -> list[str]:
    """Return the arguments of steps/modules.sh."""
    return [*(word for folder in manifest.module_paths for word in ("--use", folder)), *manifest.modules]


def directives_of(manifest: Manifest, request: Request) -> list[tuple[str, str | None]]:
    """Return the `#SBATCH` lines of a run: pairs of an option and its value; None if the option has no value."""
    run = RunFolder(_path(manifest.run_folder))
    requested: list[tuple[str, str | None]] = [
        ("job-name", manifest.run),
        ("nodes", str(request.nodes + request.spare)),
        # If Slurm chooses the CPUs, it gives one CPU to each task, and the launch step may have one task for each rank.
        ("ntasks-per-node", "1" if request.cpus_per_task is not None else str(tasks_per_node(manifest))),
        *([] if request.cpus_per_task is None else [("cpus-per-task", str(request.cpus_per_task))]),
    ]
    for option in WRITTEN:
        value = getattr(request, option.name)
        if value is not None:
            requested.append((option.sbatch, str(value)))
    return [
        *requested,
        *_resource_directives(request),
        *_comment_directive(request),
        *((name, value) for name, value in request.sbatch.items() if name != "gres"),
        ("chdir", manifest.run_folder),
        # The log is one file for the whole job. A requeued job appends to this file.
        ("output", batch_script.filename_pattern(str(run.log))),
        ("open-mode", "append"),
        ("export", "ALL"),
        *_stop_directives(manifest, request),
        # A step must not start while a node is still booting or cleaning up.
        ("wait-all-nodes", "1"),
    ]


# `scontrol show job` shows a job's comment. If the site stores comments (AccountingStoreFlags=job_comment), sacct shows
# the comment, too.
_COMMENT_PREFIX = "hpcenv:"


def _comment_directive(request: Request) -> list[tuple[str, str | None]]:
    """Return the directive for the job's comment: the user's own comment, then the fingerprint of the lockfile."""
    words = [request.comment or "", f"{_COMMENT_PREFIX}{request.fingerprint}" if request.fingerprint else ""]
    comment = " ".join(word for word in words if word)
    return [("comment", comment)] if comment else []


def _stop_directives(manifest: Manifest, request: Request) -> list[tuple[str, str | None]]:
    """Return the directives for a signal before the time limit, and for a requeue after preemption or node failure."""
    # Without `B:` only the job steps get the signal. The batch shell waits for the steps.
    warning = [("signal", f"USR2@{manifest.stop.grace}")] if manifest.launches and manifest.stop.grace else []
    if manifest.stop.requeue == "never":
        return [*warning, ("no-requeue", None)]
    return [*warning, ("requeue", "expedite" if request.expedite else None)]


def _resource_directives(request: Request) -> list[tuple[str, str | None]]:
    """Return the directives for GPUs and other resources, with only one `--gres`, because sbatch uses the last one."""
    gres, directives = request.sbatch.get("gres"), []
    if request.gpus_per_node:
        count = f"{request.gpu_type}:{request.gpus_per_node}" if request.gpu_type else str(request.gpus_per_node)
        if request.gpu_request == "gres":
            gres = f"gpu:{count},{gres}" if gres else f"gpu:{count}"
        else:
            directives.append(("gpus-per-node", count))
    return [*directives, *([("gres", gres)] if gres else [])]


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
        # The time limit assumes 20 MB/s, because a slower file system is useless for jobs.
        f"--time={10 + total // (20 * 10**6 * 60)}",
        "--job-name=stage",
    ]


def tasks_per_node(manifest: Manifest) -> int:
    """Return how many Slurm tasks the launch step has on each node."""
    return manifest.nproc_per_node if manifest.launch.launcher == "srun" and manifest.launches else 1


def _launch_options(manifest: Manifest, request: Request) -> list[str]:
    tasks = tasks_per_node(manifest)
    cpus = None if request.cpus_per_task is None else request.cpus_per_task // tasks
    return [
        f"--nodes={request.nodes}",
        f"--ntasks={request.nodes * tasks}",
        f"--ntasks-per-node={tasks}",
        # The value is a file with the nodes that the decide step chose. srun reads a file if the value has a slash.
        *([f"--nodelist={RunFolder(_path(manifest.run_folder)).launched}"] if request.spare else []),
        *([] if cpus is None else [f"--cpus-per-task={cpus}"]),
        # The failure of one node ends the step at once.
        "--kill-on-bad-exit=1",
        # When the first task has ended, srun waits this long for the other tasks. Then srun ends the step, because a
        # node may hang. With 0, srun prints a warning after 60 s.
        f"--wait={SECONDS_FOR_SLOWER_NODES}",
        "--unbuffered",
        "--job-name=launch",
        *native_options.options_of(request.srun),
    ]


def _inside_options(manifest: Manifest, request: Request, name: str) -> list[str]:
    minutes = -(-manifest.check_seconds // 60) + 10
    return [
        f"--nodes={request.nodes}",
        f"--ntasks={request.nodes}",
        "--ntasks-per-node=1",
        *([f"--nodelist={RunFolder(_path(manifest.run_folder)).launched}"] if request.spare else []),
        *_cpus(request),
        "--kill-on-bad-exit=0",
        f"--time={minutes}",
        f"--job-name={name}",
        # This step gets the options of the launch step, because this step checks the cores that a rank gets.
        *native_options.options_of(request.srun),
    ]


def _smoke_options(manifest: Manifest, request: Request, smoke: SmokeOptions) -> list[str]:
    # The start of the smoke test has the time limit of the check. Each of the four phases has its own time limit. The
    # limit of the whole step is only for a node that hangs.
    minutes = -(-(manifest.check_seconds + 4 * int(smoke.seconds)) // 60) + 5
    return [
        f"--nodes={request.nodes}",
        f"--ntasks={request.nodes}",
        "--ntasks-per-node=1",
        *([f"--nodelist={RunFolder(_path(manifest.run_folder)).launched}"] if request.spare else []),
        *_cpus(request),
        "--kill-on-bad-exit=0",
        f"--time={minutes}",
        "--job-name=smoke",
        # The smoke test gets the options of the launch step, because options such as --network change the result of the
        # test.
        *native_options.options_of(request.srun),
    ]


def _on_all_nodes(request: Request) -> list[str]:
    nodes = request.nodes + request.spare
    return [f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]


def _cpus(request: Request) -> list[str]:
    return [] if request.cpus_per_task is None else [f"--cpus-per-task={request.cpus_per_task}"]


def _path(text: str) -> Path:
    if "\n" in text or "\0" in text:
        raise UsageError(f"the path of the run folder has a newline: {text!r}")
    return Path(text)
