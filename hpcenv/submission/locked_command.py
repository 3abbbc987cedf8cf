"""`hpcenv run`: run any command in the locked environment, on this machine or on the nodes of an allocation.

Runs on: LOGIN NODE, or the node of an allocation on which the user types. Before the command starts, the gate checks
the nodes in the same way as for a job: there are a run folder, steps and a verdict. But salloc has no batch script, so
this process starts the steps with srun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.errors import Command, HpcenvError, NodeRejected, NodesUnknown, RecordInvalid, UsageError
from hpcenv.hostlist import expand_hostlist
from hpcenv.machine.this_node import LOCAL_JOB, LOCAL_NODE, LOCAL_NODES
from hpcenv.project import native_options
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.records.files import load_record, read_file, read_json
from hpcenv.records.manifest import Manifest
from hpcenv.records.run_folder import RunFolder
from hpcenv.records.verdict import Verdict
from hpcenv.steps.local import node_names
from hpcenv.submission import submit as submission
from hpcenv.submission.loaded_modules import load_modules
from hpcenv.submission.plan import Plan
from hpcenv.submission.plan_job import plan_job
from hpcenv.submission.request import SubmitOptions


@dataclass(frozen=True, kw_only=True)
class CurrentAllocation:
    """The allocation in which this process runs (salloc, srun or sbatch).

    Attributes:
        gpus: number of GPUs on each node; None if Slurm does not report this number.
    """

    job_id: str
    nodes: tuple[str, ...]
    gpus: int | None


def find_allocation(environ: Mapping[str, str]) -> CurrentAllocation | None:
    """Return the allocation in which this process runs; None if it runs outside of an allocation.

    salloc, srun and sbatch set SLURM_JOB_ID and SLURM_JOB_NODELIST. SLURM_GPUS_PER_NODE has the value of the option
    `--gpus-per-node`. On a node of the job, SLURM_GPUS_ON_NODE has the number of GPUs of this node (salloc(1), srun(1),
    Slurm 22.05 to 26.05).

    Raises:
        UsageError: SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is not a list of nodes.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        return None
    try:
        nodes = expand_hostlist(environ.get("SLURM_JOB_NODELIST", ""))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the nodes of job {job_id} are not known",
            why=f"SLURM_JOB_ID is set, but SLURM_JOB_NODELIST is no list of nodes: {error}",
            hint="type this in the shell that salloc starts; to run here: env -u SLURM_JOB_ID hpcenv run ...",
        ) from error
    counts = (environ.get("SLURM_GPUS_ON_NODE", ""), environ.get("SLURM_GPUS_PER_NODE", "").rpartition(":")[2])
    gpus = next((int(count) for count in counts if count.isdecimal()), None)
    return CurrentAllocation(job_id=job_id, nodes=nodes, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class CheckedPlace:
    """The nodes, or this machine, after the gate has accepted them.

    Attributes:
        nodes: the names of the nodes, in Slurm's order; on this machine, the name of an emulated node.
        notes: what the user should know.
        environ: the environment for the command: the user's environment, changed by the modules of the site profile.
    """

    plan: Plan
    run: RunFolder
    nodes: tuple[str, ...]
    notes: tuple[str, ...]
    allocation: CurrentAllocation | None
    environ: Mapping[str, str]


def check_place(workspace: Workspace, options: SubmitOptions, context: Context) -> CheckedPlace:
    """Check this machine, or all nodes of the allocation, in the same way as a job.

    Args:
        options: the options, without a script.

    Raises:
        NodeRejected: a field that must match differs. The error has the table of differences.
        NodesUnknown: hpcenv could not find out whether the nodes match.
        HpcenvError: as for `plan_job`.
    """
    allocation = find_allocation(context.environ)
    plan = _plan(workspace, options, context, allocation)
    run = RunFolder(Path(plan.manifest.run_folder))
    submission.make_folder(run.path)
    submission.materialize(plan, run, context)
    # Only the check is recorded as a run. The actions of the command are not recorded.
    submission.record(plan, run, "local" if allocation is None else allocation.job_id)
    steps = _Steps(run, plan.manifest, context.environ, allocation)
    status = steps.check()
    if status != 0:
        raise _refusal(run, status, of_modules=steps.modules_failed)
    nodes = node_names(1) if allocation is None else allocation.nodes
    return CheckedPlace(plan=plan, run=run, nodes=nodes, notes=plan.notes, allocation=allocation, environ=steps.environ)


def _plan(workspace: Workspace, options: SubmitOptions, context: Context, allocation: CurrentAllocation | None) -> Plan:
    gpus = options.gpus if options.gpus is not None or allocation is None else allocation.gpus
    shape = replace(
        options,
        gpus=gpus or 0,
        nproc=gpus or 1,
        nodes=1 if allocation is None else len(allocation.nodes),
        cluster="local" if allocation is None else "slurm",
        allocated=allocation is not None,
        site_here=True,
        preflight=options.preflight or "quick",
        name=f"run-{time.strftime('%Y%m%d-%H%M%S', context.now)}-{context.token}",
    )
    plan = plan_job(workspace, shape, context)
    # Only a job has spare nodes, copies of images and data on the nodes, and `setup` lines in its batch script.
    return replace(plan, manifest=replace(plan.manifest, spare=0, retry_excluding=0, stage=None, setup=()))


class _Steps:
    """Starts the steps of a job that checks its nodes. The output of the steps is written to the run's log.

    Attributes:
        environ: the environment of the steps. After the check, it also has the variables that the modules of the site
            profile set.
        modules_failed: whether the modules could not be loaded.
    """

    def __init__(
        self, run: RunFolder, manifest: Manifest, environ: Mapping[str, str], allocation: CurrentAllocation | None
    ) -> None:
        self._run = run
        self._manifest = manifest
        self._allocation = allocation
        self.environ = slurm_command.clean_environment(environ)
        self.modules_failed = False

    def check(self) -> int:
        """Run the steps of the check, and return the exit status of the gate: 0, 90 or 91."""
        place = self._first_node()
        status = self._start(self._step("begin"), place) or self._load_modules()
        if status == 0:
            # The exit status of the check step is not needed, because the decide step names the nodes that wrote no
            # facts.
            self._start([*self._on_all_nodes(), *self._step("check")], place)
            status = self._start(self._step("decide"), place)
        self._start(self._step("finish", str(status)), place)
        return status

    def _first_node(self) -> dict[str, str]:
        """Return the variables that describe the first node. The batch script of a job would run on this node."""
        if self._allocation is None:
            nodes = node_names(1)
            return {LOCAL_NODE: nodes[0], LOCAL_NODES: nodes[0], LOCAL_JOB: f"local-{os.getpid()}"}
        # These steps only read and write files of the run folder.
        job_id, nodes = self._allocation.job_id, self._allocation.nodes
        return {"SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": ",".join(nodes), "SLURMD_NODENAME": nodes[0]}

    def _on_all_nodes(self) -> list[str]:
        if self._allocation is None:
            return []
        srun = srun_argv(self._allocation.job_id, self._allocation.nodes, environ=self.environ)
        return [*srun, "--kill-on-bad-exit=0", "--job-name=check"]

    def _load_modules(self) -> int:
        """Load the modules of the site profile into the environment of the steps, as the batch script does."""
        if self._manifest.modules:
            try:
                self.environ = load_modules(self._run, self._manifest, self.environ, python=sys.executable)
            except NodesUnknown as error:
                self.modules_failed = True
                return error.exit_status
        for name in self._manifest.unset:
            self.environ.pop(name, None)
        return 0

    def _step(self, step: str, *words: str) -> list[str]:
        return [sys.executable, "-I", str(self._run.step), step, str(self._run.path), *words]

    def _start(self, argv: Sequence[str], place: Mapping[str, str]) -> int:
        with open(self._run.log, "ab") as log:
            env = {**self.environ, **place}
            return process.start(argv, env=env, cwd=self._run.path, stdout=log, stderr=log).wait()


def srun_argv(job_id: str, nodes: Sequence[str], *, environ: Mapping[str, str]) -> list[str]:
    """Return the srun command of a job step with one task on each node. Other steps can run at the same time.

    With `--overlap` (Slurm 20.11 and later), the step shares CPUs, memory and GPUs of the job with salloc's shell,
    because this shell may be a job step, too. With `--cpu-bind=none`, each task uses all CPUs that the job has on the
    node.

    Raises:
        ToolMissing: srun is missing.
    """
    srun = process.find_tool("srun", needed_for="run a command in an allocation", path=environ.get("PATH"))
    count = len(nodes)
    where = (f"--jobid={job_id}", "--overlap", f"--nodelist={','.join(nodes)}", f"--nodes={count}")
    return [srun, *where, f"--ntasks={count}", "--ntasks-per-node=1", "--cpu-bind=none"]


def _refusal(run: RunFolder, status: int, *, of_modules: bool) -> HpcenvError:
    """Return the error for a failed check. It has the end of the log, with the table of differences.

    Args:
        of_modules: whether the modules of the site profile could not be loaded.
    """
    try:
        verdict = load_record(Verdict, run.verdict)
        result, of_checks = verdict.result, verdict.of_checks
    except RecordInvalid:
        result, of_checks = "unknown", False
    try:
        log = read_file(run.log, most=1 << 20, follow=False).decode("utf-8", "replace").strip()
    except OSError as error:
        log = f"{run.log}: {error.strerror}"
    if of_modules:
        what = "the command was not started: the modules of the site profile cannot be loaded here"
        return NodesUnknown(what, why=log, hint="--site none starts it without the site profile")
    hint = ("the check is kept as a run: ", Command("hpcenv", "report", run.path.name))
    if status == NodeRejected.exit_status and result == "mismatch":
        what = "a check failed" if of_checks else "a node differs from the lockfile"
        return NodeRejected(f"the command was not started: {what}", why=log, hint=hint)
    what = "the command was not started: hpcenv could not find out whether the nodes match the lockfile"
    return NodesUnknown(what, why=log or f"the check ended with status {status}", hint=hint)


def count_nodes(allocation: CurrentAllocation | None, *, nodes: int | None, pty: bool) -> int:
    """Return the number of nodes on which a command starts.

    Args:
        allocation: the allocation; None for this machine.
        nodes: the number that the user wants. None means all nodes; with `pty`, None means only the first node.
        pty: whether the command gets a terminal.

    Raises:
        UsageError: the allocation has fewer nodes than the user wants, or several tasks would share one terminal.
    """
    most = 1 if allocation is None else len(allocation.nodes)
    count = nodes if nodes is not None else 1 if pty else most
    if count > most:
        has = "this machine is one" if allocation is None else f"job {allocation.job_id} has {most}"
        raise UsageError(f"{count} nodes for the command", why=has, hint=f"--nodes {most}, or leave it out")
    if pty and count > 1:
        raise UsageError("`--pty` is for one node", why=f"{count} nodes have one terminal", hint="leave out --nodes")
    return count


def start_argv(
    place: CheckedPlace, command: Sequence[str], *, count: int, pty: bool
) -> tuple[list[str], dict[str, str]]:
    """Return the command line that starts a command in the checked environment, and its variables.

    Args:
        command: the command; if `command` is empty, a shell is started.
        count: the command starts on the first `count` nodes.
        pty: whether the command gets a terminal.

    Raises:
        ToolMissing: srun is missing.
    """
    step = [sys.executable, "-I", str(place.run.step), "attach", str(place.run.path), "without-secrets", *command]
    env = dict(place.environ)
    if place.allocation is None:
        job = str(read_json(place.run.started)["job_id"])
        return step, env | {LOCAL_NODE: place.nodes[0], LOCAL_NODES: ",".join(place.nodes), LOCAL_JOB: job}
    argv = srun_argv(place.allocation.job_id, place.nodes[:count], environ=env)
    argv += [*(["--pty"] if pty else []), "--job-name=run", *native_options.options_of(place.plan.request.srun)]
    return [*argv, *step], env
