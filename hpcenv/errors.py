"""Every error that hpcenv raises on purpose, and every exit status that has a meaning.

Runs on: everywhere (login node, compute node). Standard library only.

An error has three parts. *what*: what is wrong. *why*: the cause, with the origin of the value (file
and key, flag or variable). *hint*: the next command to type. `code` is a stable kebab-case name and
`exit_status` a stable number. docs/reference/errors.md lists these names and numbers, and a test compares that page
with this file.

    HpcenvError              1   a bug in hpcenv
    |- UsageError            2   the arguments of a command or of an API call
    |- SpecError             3   hpcenv.toml
    |- LockfileMissing       4   no lockfile of that name
    |- LockfileInvalid       5   unreadable, not TOML, wrong structure
    |- LockfileNewer         6   written with a newer schema
    |- LockfileStale         7   hpcenv.toml asks for something that the lockfile does not have
    |- ToolMissing           8   sbatch, apptainer ... not on PATH
    |- ToolFailed            9   an outside program failed or did not answer
    |- ImageUnavailable     10   unknown image, registry down, access denied
    |- ImageMismatch        11   the SIF on disk is not the locked one
    |- EnvironmentUnreadable 12  facts could not be collected
    |- ScriptUnusable       13   the training script is missing, unreadable or broken
    |- RunFolderNotShared   14   compute nodes cannot see the run folder
    |- SubmitRejected       15   Slurm refused the job
    |- RunNotFound          16   no such run
    |- WouldOverwrite       17   a file is in the way
    |- RecordInvalid        18   a manifest, facts or verdict file is damaged
    |- FileUnusable         19   a file or folder cannot be read or written
    |- SubmitUncertain      20   sbatch did not report whether the job is queued
    |- PinsDiffer           21   installed packages differ from a pins file
    |- LintFailed           22   `image lint` found problems
    |- RunNotRunning        23   the command needs an active run
    |- JobFailed            24   the run of a function ended without a result
    |- RunEndUnknown        25   a run has ended, and a command that waited for it cannot read its exit status
    |- NotAccepted          29   the project asks for something that the user has not accepted
    |- CannotStart          31   Slurm will not start a job in its present form, and a command waits for the job
    |- NotComparable        42   two runs have no metric with the same steps
    |- BundleInvalid        45   a bundle cannot be used: changed, cut off, or not safe to unpack
    |- HashesUnproved       47   the hash of a wheel is required and not confirmed
    |- DataUnavailable      48   data of a hub are missing, or the local data differ from the data of the hub
    |- NodeRejected         90   in the job: a node differs from the lockfile
    |- NodesUnknown         91   in the job: a value that must match could not be read
    |- VerifyWarned         92   `verify --strict`: only fields of severity `warn` differ
    |- NodesDisagree        93   nodes differ from each other, but each node matches the lockfile
    |- SetupFailed          94   in the job: a line of `setup` failed
    |- WaitTimeout         124   `wait --timeout`: the time is over, the run goes on
    `- Interrupted         130   the user interrupted (^C)

The numbers 27, 28 and 46 belonged to features that were removed. No new error gets these numbers.

Training scripts are unlikely to use the numbers 90 to 94. So the exit status of a job shows whether
the gate stopped the job or the program failed. `submit --wait`, `rerun --wait` and `wait` end with
the exit status of the run, which may be any number. The last line of their output names this number.
"""

from __future__ import annotations

import copy
import shlex
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Self


class Status:
    """Exit statuses that belong to no error."""

    DIFFERENT = 26
    """`hpcenv diff`: the two sides differ in a field that must match."""

    NO_CAUSE_FOUND = 30
    """`hpcenv diagnose`: the logs do not name a cause for every run, or no run has failed."""

    WITHIN_TOLERANCE = 40
    """`hpcenv compare` and `reproduce`: the results are within the tolerance, but not equal to the last bit."""

    RESULTS_DIFFER = 41
    """`hpcenv compare` and `reproduce`: the results differ by more than the tolerance, or have different steps."""

    DOES_NOT_RUN = 43
    """`hpcenv compat`: the combination does not run."""

    NOT_IN_TABLE = 44
    """`hpcenv compat`: the compatibility table does not say whether the combination runs."""

    RUN_HAS_ENDED = 100
    """With this status, a step tells the batch script that the run has ended in an earlier job of its chain."""

    NOT_DONE = 101
    """With this status, a step reports to the batch script: the training has saved its state and is not complete, but
    the job is not queued again."""

    PIPE_CLOSED = 141
    """The reader of hpcenv's output closed the pipe, as in `hpcenv logs | head`: 128 + SIGPIPE."""

    TERMINATED = 143
    """SIGTERM stopped a run, or a run saved its state and stopped, and is not queued again: 128 + SIGTERM."""


class Command(tuple[str, ...]):
    """A command in a hint, as a list of words. hpcenv prints the words with shell quoting.

    hint=Command("hpcenv", "status", run)
    hint=("remove it first: ", Command("hpcenv", "image", "prune"))
    """

    __slots__ = ()

    def __new__(cls, *argv: str) -> Self:
        """Return the command that consists of these words."""
        return super().__new__(cls, argv)

    def __str__(self) -> str:
        return shlex.join(self)


# Text without a command, one command, or text and commands in the order in which they are printed.
Hint: TypeAlias = "str | Command | tuple[str | Command, ...]"


class HpcenvError(Exception):
    """What is wrong, why, and what to do next.

    Do not change an error after it was raised. If an error needs different texts, raise `error.changed(...)` from the
    old error.

    Args:
        what: one sentence without a final full stop. The sentence quotes the wrong value.
        why: the cause and the origin of the value; may have several lines.
        hint: the next command to type.
    """

    code = "internal"
    exit_status = 1

    def __init__(self, what: str, *, why: str | None = None, hint: Hint | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint_parts = _parts(hint)

    @property
    def hint(self) -> str | None:
        """The hint as text, with its commands quoted for a shell; None if the error has no hint."""
        return render_hint(self.hint_parts) or None

    def changed(self, *, what: str | None = None, why: str | None = None, hint: Hint | None = None) -> Self:
        """Return a copy of this error with different texts. A text stays as it is if its argument is None."""
        error = copy.copy(self)
        error.what = self.what if what is None else what
        error.why = self.why if why is None else why
        error.hint_parts = self.hint_parts if hint is None else _parts(hint)
        error.args = (error.what,)
        return error

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"why: {self.why}")
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def _parts(hint: Hint | None) -> tuple[str | Command, ...]:
    if hint is None:
        return ()
    return (hint,) if isinstance(hint, (str, Command)) else hint


def render_hint(parts: tuple[str | Command, ...]) -> str:
    """Return a hint as text. A command inside a text gets backticks; a command without a text gets no backticks."""
    if len(parts) == 1:
        return str(parts[0])
    return "".join(f"`{part}`" if isinstance(part, Command) else part for part in parts)


class UsageError(HpcenvError):
    """The arguments of a command, or of a call of the Python API, are wrong."""

    code = "usage"
    exit_status = 2


class SpecError(HpcenvError):
    """hpcenv.toml is missing, unreadable or not valid."""

    code = "spec-invalid"
    exit_status = 3


class LockfileMissing(HpcenvError):
    """No lockfile of that name exists."""

    code = "lockfile-missing"
    exit_status = 4


class LockfileInvalid(HpcenvError):
    """The file is not a valid lockfile."""

    code = "lockfile-invalid"
    exit_status = 5


class LockfileNewer(HpcenvError):
    """The schema of the lockfile is newer than the schema of this hpcenv."""

    code = "lockfile-newer"
    exit_status = 6


class LockfileStale(HpcenvError):
    """hpcenv.toml asks for something that is not in the lockfile."""

    code = "lockfile-stale"
    exit_status = 7


class ToolMissing(HpcenvError):
    """A program that is needed is not on PATH."""

    code = "tool-missing"
    exit_status = 8


class ToolFailed(HpcenvError):
    """An outside program failed, or did not answer in time.

    Args:
        argv: the program and its arguments.
        status: exit status of the program; None if hpcenv stopped it at the time limit.
        stderr: the end of the standard error of the program.
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
        hint: Hint | None = None,
    ) -> None:
        super().__init__(what, why=why, hint=hint)
        self.argv = argv
        self.status = status
        self.stderr = stderr


class ImageUnavailable(HpcenvError):
    """The image reference cannot be resolved: the image is unknown, the registry is down, or access is denied."""

    code = "image-unavailable"
    exit_status = 10


class ImageMismatch(HpcenvError):
    """A SIF on disk is missing, or is not the SIF that the lockfile names."""

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
    """Compute nodes cannot see the run folder."""

    code = "run-folder-not-shared"
    exit_status = 14


class SubmitRejected(HpcenvError):
    """Slurm refused the job; nothing is queued."""

    code = "submit-rejected"
    exit_status = 15


class SubmitUncertain(SubmitRejected):
    """sbatch did not report whether the job is queued. hpcenv looks for the job and cancels it."""

    code = "submit-uncertain"
    exit_status = 20


class RunNotFound(HpcenvError):
    """No run folder, job id or latest run matches.

    Attributes:
        word: the typed text, if it matches no run; None if the text names a folder without a run.
    """

    code = "run-not-found"
    exit_status = 16
    word: str | None = None


class WouldOverwrite(HpcenvError):
    """A file is in the way and hpcenv does not overwrite it."""

    code = "would-overwrite"
    exit_status = 17


class RecordInvalid(HpcenvError):
    """A record of a run (manifest, facts, verdict) is damaged."""

    code = "record-invalid"
    exit_status = 18


class FileUnusable(HpcenvError):
    """The operating system refused a file or folder: no permission, disk full, quota."""

    code = "file-unusable"
    exit_status = 19


class PinsDiffer(HpcenvError):
    """The installed packages differ from the pins in the file of `lock --from`."""

    code = "pins-differ"
    exit_status = 21


class HashesUnproved(HpcenvError):
    """The sha256 of a wheel is not confirmed, but `lock --require-hashes` or [policy] requires the confirmation."""

    code = "hashes-unproved"
    exit_status = 47


class DataUnavailable(HpcenvError):
    """Data of a hub were not fetched, were changed after they were fetched, or cannot be fetched from the hub."""

    code = "data-unavailable"
    exit_status = 48


class LintFailed(HpcenvError):
    """`image lint` found problems in a recipe or an image."""

    code = "lint-failed"
    exit_status = 22


class RunNotRunning(HpcenvError):
    """The command needs a run that is active, but this run waits in the queue or has ended."""

    code = "run-not-running"
    exit_status = 23


class JobFailed(HpcenvError):
    """`Executor`: the function's run ended without a result, or its result cannot be read."""

    code = "job-failed"
    exit_status = 24


class RunEndUnknown(HpcenvError):
    """`wait`, `submit --wait`: a run ended, and neither Slurm nor the run folder has the exit status of the run."""

    code = "run-end-unknown"
    exit_status = 25


class NotAccepted(HpcenvError):
    """The project asks this machine for something that the user has not accepted. Nothing was started."""

    code = "not-accepted"
    exit_status = 29


class CannotStart(HpcenvError):
    """`wait`, `logs -f`, `submit --wait`: Slurm will not start the job in its present form. The job stays queued."""

    code = "cannot-start"
    exit_status = 31


class NotComparable(HpcenvError):
    """Two runs have no metric with the same steps, so their results cannot be compared."""

    code = "not-comparable"
    exit_status = 42


class BundleInvalid(HpcenvError):
    """A bundle cannot be used: it was changed, it was cut off, or it would write outside its folder."""

    code = "bundle-invalid"
    exit_status = 45


class WaitTimeout(HpcenvError):
    """`wait --timeout`: the time is over and the run continues. timeout(1) uses the same exit status, 124."""

    code = "wait-timeout"
    exit_status = 124


class NodeRejected(HpcenvError):
    """In the job: at least one node differs from the lockfile."""

    code = "node-rejected"
    exit_status = 90


class NodesUnknown(HpcenvError):
    """In the job: a value that must match could not be read on a node."""

    code = "nodes-unknown"
    exit_status = 91


class SetupFailed(HpcenvError):
    """In the job: a line of `setup` failed before the nodes were checked. The batch script ends with this status."""

    code = "setup-failed"
    exit_status = 94


class Interrupted(HpcenvError):
    """The user interrupted the command. A shell reports SIGINT as 130."""

    code = "interrupted"
    exit_status = 130


class VerifyWarned(HpcenvError):
    """`verify --strict`: nothing blocks, but a field of severity `warn` differs."""

    code = "verify-warned"
    exit_status = 92


class NodesDisagree(HpcenvError):
    """Every node matches the lockfile, but the nodes differ from each other."""

    code = "nodes-disagree"
    exit_status = 93
