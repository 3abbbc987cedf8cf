"""Hand a batch script and one callable to Slurm, with submitit beside (`submitit_books`).

Runs on: LOGIN NODE.

submitit pickles a reference to `hpcenv.node.task.LaunchTask` and keeps its books; the
batch script is ours and is submitted where it lies in the run folder, byte for byte. The
call of sbatch is ours too: submitit's own has no time limit, takes the first "job N" of a
site's banner for the job id, and swallows sbatch's warnings. submitit runs on the host
Python, the container below it: inside a container it would find no scontrol.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcenv.adapters import process, slurm
from hpcenv.dataclass import dataclass
from hpcenv.errors import SubmitRejected, SubmitUncertain, ToolFailed

if TYPE_CHECKING:
    from typing_extensions import Self

# sbatch itself gives up on a silent slurmctld after MessageTimeout (10 s) and a few
# retries; with a site's job_submit plugin a minute is not unheard of.
_SECONDS = 180.0


# submitit from a parallel file system that serves many: its import alone can take seconds.
_BOOKS_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A queued job, with what sbatch warned about."""

    job_id: str
    warnings: tuple[str, ...]


class Books:
    """submitit in a process of its own, which loads it while the run is planned; for a `with`.

    Args:
        environ: the user's environment; Slurm's and outer launchers' variables are dropped.

    Raises:
        ToolMissing, ToolFailed: Python cannot be started.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        program = Path(__file__).with_name("submitit_books.py")
        self._argv = [sys.executable, "-I", str(program), json.dumps(sys.path)]
        # Its own session: ^C is for this process, which ends the other.
        self._child = process.start(
            self._argv,
            env=slurm.clean_environment(environ),
            stdin=process.PIPE,
            stdout=process.PIPE,
            stderr=process.PIPE,
            new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._child.stdin is None or self._child.stdin.closed:
            return
        self._child.kill()
        self._child.communicate()

    def keep(
        self, task: type, run_folder: str, *, job_id: str, folder: Path, script: Path, nodes: int, minutes: int
    ) -> None:
        """Let submitit write down a queued job.

        Raises:
            ToolFailed: it did not.
        """
        job = {
            "module": task.__module__,
            "task": task.__qualname__,
            "run_folder": run_folder,
            "job_id": job_id,
            "folder": str(folder),
            "script": str(script),
            "nodes": nodes,
            "minutes": minutes,
        }
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(json.dumps(job).encode() + b"\n")
            self._child.stdin.flush()
        answer = self._line()
        if answer.strip() != job_id:
            self._child.kill()
            said = self._child.communicate()[1].decode(errors="replace").strip()
            raise ToolFailed("submitit did not take the job", argv=tuple(self._argv[:3]), stderr=said, why=said[-2000:])

    def _line(self) -> str:
        assert self._child.stdout is not None
        deadline, found = time.monotonic() + _BOOKS_SECONDS, b""
        while not found.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
            if not select.select([self._child.stdout], [], [], left)[0]:
                break
            piece = self._child.stdout.read1(1000)  # type: ignore[attr-defined]
            if not piece:
                break
            found += piece
        return found.decode(errors="replace")


def submit(
    *,
    task: type,
    run_folder: str,
    folder: Path,
    script: Path,
    nodes: int,
    minutes: float | None,
    environ: Mapping[str, str],
    options: Sequence[str] = (),
    books: Books | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> Submitted:
    """Submit the script and return Slurm's job id.

    Args:
        task: class of what every node calls, importable there; pickled by reference.
        run_folder: the task's argument.
        folder: where submitit keeps its pickles; in the run folder, so shared.
        script: the batch script's file.
        nodes, minutes: submitit wants to know them for its own bookkeeping.
        environ: the user's environment; Slurm's and outer launchers' variables are dropped.
        options: for sbatch; they win over the script's own lines.
        books: submitit, where it is loaded already.
        meanwhile: called while sbatch waits for its answer.

    Raises:
        ToolMissing: no sbatch or srun.
        SubmitRejected: sbatch refused; nothing is queued.
        SubmitUncertain: sbatch did not answer, or nobody understands its answer.
        ToolFailed: the job is queued, but submitit did not write it down.
    """
    sbatch = _find_tools(environ)
    with contextlib.ExitStack() as stack:
        books = stack.enter_context(Books(environ)) if books is None else books
        job_id, said = _call_sbatch(sbatch, script, environ, options, meanwhile)
        books.keep(
            task,
            run_folder,
            job_id=job_id,
            folder=folder,
            script=script,
            nodes=nodes,
            minutes=max(1, int(minutes or 1)),
        )
    return Submitted(job_id=job_id, warnings=tuple(_warnings(said)))


def submit_array(*, script: Path, environ: Mapping[str, str], options: Sequence[str] = ()) -> Submitted:
    """Submit the script of a job array and return the array's job id.

    Without submitit: its arrays drop every override of an executor (submitit 1.5.4), and it
    would pickle one and the same callable for every element.

    Args:
        script: the batch script's file; its `#SBATCH --array` says which elements there are.
        environ, options: as for `submit`.

    Raises:
        ToolMissing, SubmitRejected, SubmitUncertain: as for `submit`.
    """
    job_id, said = _call_sbatch(_find_tools(environ), script, environ, options)
    return Submitted(job_id=job_id, warnings=tuple(_warnings(said)))


def _find_tools(environ: Mapping[str, str]) -> str:
    path = environ.get("PATH")
    sbatch = process.find_tool("sbatch", needed_for="submit a job", path=path)
    process.find_tool("srun", needed_for="start the steps of a job", path=path)
    return sbatch


def _warnings(said: str) -> list[str]:
    return [line.partition("warning:")[2].strip() for line in said.splitlines() if "warning:" in line]


def _call_sbatch(
    sbatch: str,
    script: Path,
    environ: Mapping[str, str],
    options: Sequence[str],
    meanwhile: Callable[[], object] = lambda: None,
) -> tuple[str, str]:
    """Return the job id and what sbatch wrote to standard error."""
    try:
        argv, env = [sbatch, *options, str(script)], slurm.clean_environment(environ)
        with process.Begun(argv, timeout=_SECONDS, env=env) as asked:
            meanwhile()
            done = asked.finish()
    except ToolFailed as error:
        if error.status is None:
            raise SubmitUncertain(error.what, why=error.why) from error
        reason, hint = slurm.rejection(error.stderr)
        if re.search(r"timed out|zero bytes|connection reset|broken pipe", error.stderr, re.IGNORECASE):
            # The request went out and no answer came back: the job may be queued.
            raise SubmitUncertain("Slurm did not answer", why=reason, hint=hint) from error
        raise SubmitRejected("Slurm refused the job", why=reason, hint=hint) from error
    # sbatch(1): "Submitted batch job N", and " on cluster C" behind it. A site's wrapper may
    # print a banner around that line.
    found = re.search(r"^Submitted batch job ([0-9]+)\b", done.stdout, re.MULTILINE)
    if found is None:
        raise SubmitUncertain(
            "sbatch answered without a job id", why=f"expected `Submitted batch job N`, got {done.stdout[:500]!r}"
        )
    return found[1], done.stderr
