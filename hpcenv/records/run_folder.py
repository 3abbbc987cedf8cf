"""The names of the files in a run folder. No other module contains these names.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFolder:
    """Every path of a run, named once.

    When the job starts again, the files of the earlier attempt (`of_one_attempt`) are moved to `attempts/N/`. So the
    top level of the run folder always belongs to the newest attempt.
    """

    path: Path

    @property
    def manifest(self) -> Path:
        return self.path / "manifest.json"

    @property
    def script(self) -> Path:
        return self.path / "job.sbatch"

    @property
    def lockfile(self) -> Path:
        return self.path / "lock.toml"

    @property
    def requirements(self) -> Path:
        """The packages of the lockfile in pip's format, for people and other tools. hpcenv does not read this file."""
        return self.path / "requirements.txt"

    @property
    def request(self) -> Path:
        """The options of the submission, for `hpcenv rerun`; also in the folder of a sweep."""
        return self.path / "request.json"

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def sweep(self) -> Path:
        """File in the folder that contains the run folders of a sweep."""
        return self.path / "sweep.json"

    @property
    def code(self) -> Path:
        return self.path / "code"

    @property
    def step(self) -> Path:
        return self.code / "step.py"

    @property
    def archive(self) -> Path:
        """The modules that the steps on the nodes import, and the compiled files that Python made from them."""
        return self.code / "hpcenv.zip"

    def shared_archive(self, sha256: str) -> Path:
        """Return the path of the archive with this hash. The runs with the same archive have hard links to it."""
        return self.path.parent / ".data" / f"sha256-{sha256}.zip"

    @property
    def inside(self) -> Path:
        """The modules that ranks can import: `hpcenv.training`, and the module that starts torchrun."""
        return self.path / "inside"

    @property
    def source(self) -> Path:
        """The copy of the code that the run uses and works in."""
        return self.path / "source"

    @property
    def other_folder(self) -> Path:
        """The copy of the working directory, if the working directory is outside of the folder of the code."""
        return self.path / "work"

    def parts_of_copy(self) -> tuple[str, ...]:
        """Return the names of the folders that make up the copy."""
        return tuple(part.name for part in (self.source, self.other_folder) if part.is_dir())

    @property
    def listing(self) -> Path:
        """The record of the files in the copy, with their digests, as they were when the copy was made."""
        return self.path / "source.json"

    @property
    def listing_after(self) -> Path:
        """The state of the copy after the last attempt."""
        return self.path / "source-after.json"

    @property
    def source_diff(self) -> Path:
        """The difference between the copy and the recorded commit."""
        return self.path / "source.diff"

    @property
    def checkpoints(self) -> Path:
        """The files that the training saves; kept over all attempts."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Losses, metrics and hashes of parameters of every rank; kept over all attempts (`records.metrics`)."""
        return self.path / "metrics"

    @property
    def determinism(self) -> Path:
        """What every rank read back from its switches; kept over all attempts (`records.determinism`)."""
        return self.path / "determinism"

    @property
    def trace(self) -> Path:
        """The operations of chosen optimizer steps of every rank; kept over all attempts (`records.trace`)."""
        return self.path / "trace"

    @property
    def samples(self) -> Path:
        """What the run used while its ranks ran; kept over all attempts (`records.samples`)."""
        return self.path / "samples"

    @property
    def use(self) -> Path:
        """A summary of the samples, in an unpacked bundle, which has no samples (`runs.use`)."""
        return self.path / "use.json"

    @property
    def hangs(self) -> Path:
        """Requests for the stacks of all ranks, and the nodes' answers; kept over all attempts."""
        return self.path / "hangs"

    @property
    def start_hook(self) -> Path:
        """What Python runs at the start of every rank, before the script."""
        return self.path / "start-hook"

    @property
    def stopping(self) -> Path:
        """Requests to stop, and the ranks' answers, of one attempt."""
        return self.path / "stop"

    @property
    def log(self) -> Path:
        return self.path / "job.log"

    @property
    def waiting(self) -> Path:
        """Why a run without Slurm still waits for GPUs. The file is removed when the run has its GPUs."""
        return self.path / "waiting.json"

    @property
    def facts(self) -> Path:
        return self.path / "facts"

    @property
    def stage(self) -> Path:
        """The files that were copied to the nodes: one record per node."""
        return self.path / "stage"

    @property
    def modules(self) -> Path:
        """The variables that the environment modules of the job set for the ranks."""
        return self.path / "modules.json"

    @property
    def verdict(self) -> Path:
        return self.path / "verdict.json"

    @property
    def preflight(self) -> Path:
        """Results of the checks that run after the verdict: one folder for each family of checks."""
        return self.path / "preflight"

    @property
    def smoke(self) -> Path:
        """The smoke test: its plan, the reports of the nodes, and the files of the ranks."""
        return self.path / "smoke"

    @property
    def smoke_plan(self) -> Path:
        return self.smoke / "plan.json"

    @property
    def smoke_ended(self) -> Path:
        """Report of a node that could not continue the smoke test. The other nodes then end the test, too."""
        return self.smoke / "ended.json"

    @property
    def smoke_result(self) -> Path:
        return self.path / "smoke.json"

    @property
    def session(self) -> Path:
        """What the nodes report about a session, with one file for each node."""
        return self.path / "session"

    @property
    def env(self) -> Path:
        return self.path / "env"

    @property
    def exits(self) -> Path:
        return self.path / "exits"

    @property
    def ranks(self) -> Path:
        return self.path / "ranks"

    @property
    def flight(self) -> Path:
        """Dumps of torch's flight recorder, in a folder for each attempt; kept over all attempts."""
        return self.path / "flight"

    def flight_of(self, attempt: int) -> Path:
        return self.flight / str(attempt)

    @property
    def hub(self) -> Path:
        """The cache folder for a hub's library. It contains the repositories of hpcenv.toml, each at its commit."""
        return self.path / "hub"

    @property
    def homes(self) -> Path:
        return self.path / "home"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def started(self) -> Path:
        """File that shows that the batch script has begun. It names the attempt and the batch node."""
        return self.path / "started.json"

    @property
    def reserved(self) -> Path:
        """A file that reserves disk space for the end records during the run."""
        return self.path / "reserved"

    @property
    def finished(self) -> Path:
        """Exit status of the batch script, which writes this file last."""
        return self.path / "finished.json"

    def facts_of(self, node: str) -> Path:
        return self.facts / f"{node}.json"

    def staged_of(self, node: str) -> Path:
        return self.stage / f"{node}.json"

    def looked_of(self, node: str) -> Path:
        """What a node found on its own disk before anything was copied."""
        return self.stage / "look" / f"{node}.json"

    @property
    def sending(self) -> Path:
        """What the batch node decided to copy, and the target of the copy."""
        return self.stage / "plan.json"

    def checks_of(self, family: str, node: str) -> Path:
        return self.preflight / family / f"{node}.json"

    def smoke_of(self, node: str, *, pairs: bool) -> Path:
        """Report of a node on the smoke test of all nodes together, or on the test of pairs of nodes."""
        return (self.smoke_pairs if pairs else self.smoke) / f"{node}.json"

    @property
    def smoke_pairs(self) -> Path:
        """Reports on the test of pairs; the folder exists as soon as pairs must be tested."""
        return self.smoke / "pairs"

    @property
    def session_end(self) -> Path:
        """File that requests the end of a session. When it exists, the program that keeps the job open ends."""
        return self.session / "end"

    def session_start_of(self, node: str) -> Path:
        """File of the launch step. It shows that this node has passed the start gate."""
        return self.session / f"{node}.start"

    def session_of(self, node: str) -> Path:
        return self.session / f"{node}.json"

    def env_of(self, node: str) -> Path:
        return self.env / f"{node}.json"

    def ray_of(self, rendezvous: str) -> Path:
        """The prefix of two files: `.token` contains Ray's token, and `.ended` shows that the script has ended."""
        return self.env / f"ray-{rendezvous}"

    @property
    def launched(self) -> Path:
        """The nodes that train, for srun's --nodelist; written if the job has spare nodes."""
        return self.env / "launched"

    @property
    def excluded(self) -> Path:
        """The nodes that were excluded when this job was queued again; kept over all attempts."""
        return self.path / "excluded.json"

    def stop_of(self, node: str) -> Path:
        return self.stopping / f"{node}.json"

    def saved_on(self, node: str) -> Path:
        """File of a rank that has saved its state after a request to stop (`hpcenv.training`)."""
        return self.stopping / f"saved-{node}"

    def gpus_of(self, node: str, local_rank: int | None) -> Path:
        """The GPUs that torch saw before the first rank started. With `--launcher srun`, each task has its own file."""
        return self.ranks / node / ("gpus.json" if local_rank is None else f"gpus.{local_rank}.json")

    def metrics_of(self, attempt: int, rank: int) -> Path:
        return self.metrics / f"attempt-{attempt}" / f"rank-{rank}.jsonl"

    def samples_of(self, attempt: int, node: str) -> Path:
        return self.samples / f"attempt-{attempt}" / f"{node}.jsonl"

    def determinism_of(self, attempt: int, rank: int) -> Path:
        return self.determinism / f"attempt-{attempt}" / f"rank-{rank}.json"

    def trace_of(self, attempt: int, rank: int) -> Path:
        return self.trace / f"attempt-{attempt}" / f"rank-{rank}.jsonl"

    def exit_of(self, node: str) -> Path:
        return self.exits / f"{node}.json"

    def home_of(self, node: str) -> Path:
        return self.homes / node

    def of_one_attempt(self) -> tuple[Path, ...]:
        """Files of one attempt. They are moved away before the next attempt, which writes files with the same names."""
        return (
            *(self.facts, self.modules, self.stage, self.verdict, self.preflight, self.env, self.exits, self.ranks),
            *(self.smoke, self.smoke_result, self.stopping, self.session, self.started, self.finished),
        )
