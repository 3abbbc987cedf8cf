"""Every error hpcenv raises on purpose, with its code and its exit status.

Runs on: everywhere (login node, compute node). Imports nothing.

An error says *what* is wrong, *why* (with the origin of the offending value: file and
key, flag or variable) and a *hint*: the next command to type. `code` is a stable
kebab-case name, `exit_status` a stable number; both are listed in
docs/reference/errors.md and tested for uniqueness.

    HpcenvError
    |- UsageError            2   the words on the command line
    |- SpecError             3   hpcenv.toml
    |- LockfileMissing       4   no lockfile yet
    |- LockfileInvalid       5   unreadable, not TOML, wrong shape
    |- LockfileNewer         6   written by a newer schema
    |- LockfileStale         7   no longer what hpcenv.toml asks for
    |- ToolMissing           8   sbatch, apptainer ... not on PATH
    |- ToolFailed            9   an outside tool failed or did not answer
    |- ImageUnavailable     10   unknown image, registry down, access denied
    |- ImageMismatch        11   the SIF on disk is not the locked one
    |- EnvironmentUnreadable 12  facts could not be collected
    |- ScriptUnusable       13   the training script is missing, unreadable or broken
    |- RunFolderNotShared   14   compute nodes could not see the run folder
    |- SubmitRejected       15   Slurm refused the job
    |- RunNotFound          16   no such run
    |- WouldOverwrite       17   a file is in the way
    |- PinsDiffer           21   what is installed is not what a pins file says
    |- LintFailed           22   `image lint` found trouble
    |- RecordInvalid        18   a manifest, facts or verdict file is damaged
    |- FileUnusable         19   a file or folder cannot be read or written
    |- SubmitUncertain      20   sbatch did not say whether the job is queued
    |- RunNotRunning        23   a shell was asked for in a run that does not run
    |- JobFailed            24   a function's run ended without a result
    |- StillGoing          124   `wait --timeout`: the time is over, the run is not
    |- VerifyWarned         92   with --strict: something differs that is only warned of
    |- NodesDisagree        93   nodes differ from each other, none from the lockfile
    |- NodeRejected         90   in the job: a node differs from the lockfile
    |- NodesUnknown         91   in the job: could not tell
    `- Interrupted         130   the user interrupted (^C)

90 and 91 lie in a band that training scripts are unlikely to use, so that the job's own
exit status tells "the gate stopped it" from "the program failed".
"""

from __future__ import annotations


class HpcenvError(Exception):
    """What, why and what to do next.

    Args:
        what: one sentence without a final full stop; quotes the offending value.
        why: the cause and the origin of the value; may span lines.
        hint: the next command to type.
    """

    code = "internal"
    exit_status = 1

    def __init__(self, what: str, *, why: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        parts = [self.what]
        if self.why:
            parts.append(f"why: {self.why}")
        if self.hint:
            parts.append(f"hint: {self.hint}")
        return "\n".join(parts)


class UsageError(HpcenvError):
    """The words on the command line (or the arguments of an API call) make no sense."""

    code = "usage"
    exit_status = 2


class SpecError(HpcenvError):
    """hpcenv.toml is missing, unreadable or says something hpcenv does not know."""

    code = "spec-invalid"
    exit_status = 3


class LockfileMissing(HpcenvError):
    """There is no lockfile of that name yet."""

    code = "lockfile-missing"
    exit_status = 4


class LockfileInvalid(HpcenvError):
    """The lockfile cannot be read as one."""

    code = "lockfile-invalid"
    exit_status = 5


class LockfileNewer(HpcenvError):
    """The lockfile was written with a newer major schema than this hpcenv knows."""

    code = "lockfile-newer"
    exit_status = 6


class LockfileStale(HpcenvError):
    """The lockfile no longer is what hpcenv.toml asks for."""

    code = "lockfile-stale"
    exit_status = 7


class ToolMissing(HpcenvError):
    """A program that is needed is not on PATH."""

    code = "tool-missing"
    exit_status = 8


class ToolFailed(HpcenvError):
    """An outside program failed, or did not answer in time.

    Args:
        argv: what was run.
        status: its exit status, or None when it was stopped at the time limit.
        stderr: the end of what it wrote to standard error.
    """

    code = "tool-failed"
    exit_status = 9

    def __init__(
        self,
        what: str,
        *,
        argv: tuple[str, ...] = (),
        status: int | None = None,
        stderr: str = "",
        why: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.argv = argv
        self.status = status
        self.stderr = stderr


class ImageUnavailable(HpcenvError):
    """The image reference does not resolve: unknown, registry down or access denied."""

    code = "image-unavailable"
    exit_status = 10


class ImageMismatch(HpcenvError):
    """A SIF on disk is not the one the lockfile names."""

    code = "image-mismatch"
    exit_status = 11


class EnvironmentUnreadable(HpcenvError):
    """The facts of an environment could not be collected."""

    code = "environment-unreadable"
    exit_status = 12


class ScriptUnusable(HpcenvError):
    """The training script is missing, unreadable, or does not compile."""

    code = "script-unusable"
    exit_status = 13


class RunFolderNotShared(HpcenvError):
    """The run folder lies where compute nodes cannot see it."""

    code = "run-folder-not-shared"
    exit_status = 14


class SubmitRejected(HpcenvError):
    """Slurm refused the job; nothing is queued."""

    code = "submit-rejected"
    exit_status = 15


class SubmitUncertain(SubmitRejected):
    """sbatch did not say whether the job is queued; hpcenv looks for it and cancels it."""

    code = "submit-uncertain"
    exit_status = 20


class RunNotFound(HpcenvError):
    """No run folder, job id or latest run matches."""

    code = "run-not-found"
    exit_status = 16


class WouldOverwrite(HpcenvError):
    """A file is in the way and hpcenv does not overwrite it."""

    code = "would-overwrite"
    exit_status = 17


class RecordInvalid(HpcenvError):
    """A record that crossed machines (manifest, facts, verdict) cannot be read."""

    code = "record-invalid"
    exit_status = 18


class FileUnusable(HpcenvError):
    """The operating system refused a file or folder: no permission, disk full, quota."""

    code = "file-unusable"
    exit_status = 19


class PinsDiffer(HpcenvError):
    """What is installed is not what pylock.toml, requirements.txt or uv.lock pinned."""

    code = "pins-differ"
    exit_status = 21


class LintFailed(HpcenvError):
    """`image lint` found trouble in a recipe or an image."""

    code = "lint-failed"
    exit_status = 22


class RunNotRunning(HpcenvError):
    """What was asked for needs a run that is running; this one waits or has ended."""

    code = "run-not-running"
    exit_status = 23


class JobFailed(HpcenvError):
    """`Executor`: the function's run ended without a result, or its result cannot be read."""

    code = "job-failed"
    exit_status = 24


class StillGoing(HpcenvError):
    """`wait --timeout`: the time is over and the run is not; 124 is what timeout(1) gives."""

    code = "still-going"
    exit_status = 124


class NodeRejected(HpcenvError):
    """In the job: at least one node differs from the lockfile."""

    code = "node-rejected"
    exit_status = 90


class NodesUnknown(HpcenvError):
    """In the job: something that must match could not be read on a node."""

    code = "nodes-unknown"
    exit_status = 91


class Interrupted(HpcenvError):
    """The user interrupted; 130 is what a shell gives for SIGINT."""

    code = "interrupted"
    exit_status = 130


class VerifyWarned(HpcenvError):
    """`verify --strict`: nothing blocks, but something differs that is only warned of."""

    code = "verify-warned"
    exit_status = 92


class NodesDisagree(HpcenvError):
    """Every node is as locked, but they differ from each other in something that must agree."""

    code = "nodes-disagree"
    exit_status = 93
