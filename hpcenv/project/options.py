"""The table of options: one row for each option of a submission.

Runs on: LOGIN NODE. Data only.

This table defines the options of `hpcenv submit` and `hpcenv rerun`, the keys of [submit] in
hpcenv.toml and in site profiles, the keywords of the Python API, the order of the `#SBATCH` lines,
the reference page (docs/reference/options.md) and the typed classes in option_types.py and
site_option_types.py. The table is in project/, because project/ reads hpcenv.toml and site profiles, and must not
import submission/.

To add an option, write one row and run

    scripts/reference-docs

The script writes these classes, the reference page and the recorded help pages again. If the row is made with
`_directive`, you need no more code, because the value becomes the `#SBATCH` line. If hpcenv itself acts on an
option, write that code, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hpcenv.records.manifest import CPU_BINDINGS, DETERMINISM_PROFILES, LAUNCHERS

ValueKind = Literal[
    "text",  # any text
    "word",  # text without blanks, quotes and backslashes: it becomes part of an #SBATCH line
    "count",  # a whole number, at least `minimum`
    "flag",  # given or not
    "switch",  # --name or --no-name
    "choice",  # one of `choices`
    "time",  # a length of time that Slurm reads; a plain number is minutes
    "seconds",  # a length of time; a plain number is seconds
    "size",  # bytes
    "steps",  # a range of steps, A:B
    "texts",  # several texts
    "variables",  # NAME=VALUE, several times
    "secrets",  # NAME=SOURCE, several times
    "native",  # NAME[=VALUE] of another program's option, several times
]

# Kinds of which a value is a number, yes or no, or a word from a list. Such a value cannot name a file, folder or
# program outside the project.
BOUNDED: frozenset[ValueKind] = frozenset({"count", "flag", "switch", "choice", "time", "seconds", "size", "steps"})

OptionPlace = Literal["command", "python", "project", "site"]
COMMAND: frozenset[OptionPlace] = frozenset({"command", "python"})
PROJECT: frozenset[OptionPlace] = COMMAND | {"project"}
EVERYWHERE: frozenset[OptionPlace] = PROJECT | {"site"}
ONLY_COMMAND: frozenset[OptionPlace] = frozenset({"command"})
ONLY_PROJECT: frozenset[OptionPlace] = frozenset({"project"})
ONLY_FILES: frozenset[OptionPlace] = frozenset({"project", "site"})
ALL_BUT_COMMAND: frozenset[OptionPlace] = ONLY_FILES | {"python"}

# The groups are in the order of the help pages. The rows below are in the order of the `#SBATCH` lines.
OptionGroup = Literal[
    "What runs",
    "Where",
    "How many",
    "When and how long",
    "Environment",
    "Checks",
    "Many runs",
    "Staging",
    "Submit and follow",
]
GROUPS: tuple[OptionGroup, ...] = get_args(OptionGroup)

SIGNALS = ("USR1", "USR2", "TERM", "INT", "HUP")


@dataclass(frozen=True, kw_only=True)
class Option:
    """One row of the table.

    Attributes:
        name: the name in Python. On the command line and in TOML, `_` is written as `-`.
        help: the help text. This text must be understandable without the other rows.
        places: where the option can be set.
        rare: few users need the option, so only `--help-all` shows it, not `--help`.
        metavar: placeholder of the value in the help text.
        minimum: the smallest value of a count.
        choices: the values of a choice.
        default: the default of an option that always has a value.
        sbatch: option of sbatch that gets the value; empty without such an option.
        short: sbatch's one-letter spelling. hpcenv refuses this spelling, and its error names hpcenv's own option.
        letter: hpcenv's own one-letter spelling.
        srun: option of srun that gets the value.
        torchrun: option of torchrun that gets the value.
        written: whether the value is written unchanged into the `#SBATCH` line. If `written` is false, hpcenv computes
            that line.
        environment: a variable that sets sbatch's default. hpcenv uses its value as the user's default.
        needs_slurm: whether the option has no effect without Slurm (`--cluster local`).
        asks: what a value does outside the project. The record of a run may come from another person. So `rerun` and
            `reproduce` show such a value with the text in `asks`, and the user must accept the value. An empty text
            means that the value does nothing outside the project. None means that the row gives no text. Only rows of
            the kinds in `BOUNDED` may have None.
    """

    name: str
    kind: ValueKind
    group: OptionGroup
    help: str
    places: frozenset[OptionPlace] = COMMAND
    rare: bool = False
    metavar: str = ""
    minimum: int = 1
    choices: tuple[str, ...] = ()
    default: str | None = None
    sbatch: str = ""
    short: str = ""
    letter: str = ""
    srun: str = ""
    torchrun: str = ""
    written: bool = False
    environment: str = ""
    needs_slurm: bool = False
    asks: str | None = None

    @property
    def key(self) -> str:
        """The option's key in hpcenv.toml and in site profiles."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        """The option's spelling on the command line."""
        return f"--{self.key}"

    @property
    def absent(self) -> object:
        """The value that means: not given."""
        if self.kind == "flag":
            return False
        if self.kind == "switch":
            return True
        if self.kind == "texts":
            return ()
        return {} if self.kind in ("variables", "secrets", "native") else self.default


def _directive(
    name: str, kind: ValueKind, text: str, *, group: OptionGroup = "Where", rare: bool = False,
    short: str = "", environment: str = "", metavar: str = "",
) -> Option:  # fmt: skip
    """Return a row whose value is written as `#SBATCH --NAME=VALUE`; it can be set everywhere."""
    return Option(
        name=name,
        kind=kind,
        group=group,
        help=text,
        places=EVERYWHERE,
        rare=rare,
        metavar=metavar,
        sbatch=name.replace("_", "-"),
        short=short,
        written=True,
        environment=environment,
        needs_slurm=True,
        # The value is one value of one #SBATCH line, and Slurm decides what this user may request.
        asks="",
    )


OPTIONS: tuple[Option, ...] = (
    # -- Shape ----------------------------------------------------------------------------
    Option(
        name="nodes",
        kind="count",
        group="How many",
        help="Number of nodes. Default: 1.",
        places=PROJECT,
        sbatch="nodes",
        short="N",
        srun="nodes",
        torchrun="nnodes",
    ),
    Option(
        name="gpus",
        kind="count",
        minimum=0,
        group="How many",
        help="GPUs on each node, not in total. With --gpus 0 the ranks use CPUs, and --nproc says how many ranks "
        "there are.",
        places=PROJECT,
        sbatch="gpus-per-node",
        short="G",
    ),
    Option(
        name="allow_cpu_torch",
        kind="flag",
        group="How many",
        rare=True,
        help="Request GPUs although the locked torch cannot use them. The run records these GPUs, but hpcenv does "
        "not compare them.",
    ),
    Option(
        name="gpu_type",
        kind="word",
        group="How many",
        help="Type of the GPUs, as `sinfo --format=%G` names it, for example h100.",
        places=EVERYWHERE,
        metavar="TYPE",
        needs_slurm=True,
        asks="",
    ),
    Option(
        name="gpu_request",
        kind="choice",
        choices=("gpus-per-node", "gres"),
        group="How many",
        help="Option of sbatch by which this cluster accepts requests for GPUs. Default: gpus-per-node.",
        places=ONLY_FILES,
        needs_slurm=True,
    ),
    Option(
        name="nproc",
        kind="count",
        group="How many",
        help="Ranks (processes) on each node. Default: one for each GPU.",
        places=PROJECT,
        torchrun="nproc-per-node",
    ),
    Option(
        name="cpus",
        kind="count",
        group="How many",
        help="CPUs on each node. The ranks of a node share these CPUs. Default: with GPUs, the share of the node's "
        "CPUs that belongs to the requested GPUs, as scontrol shows this share; without GPUs, one core for each rank.",
        places=EVERYWHERE,
        sbatch="cpus-per-task",
        short="c",
        srun="cpus-per-task",
    ),
    Option(
        name="mem",
        kind="word",
        group="How many",
        help="Memory on each node, for example 200G. A plain number is MiB; 0 is all memory of the node. Default: "
        "the share of the node's memory that belongs to the requested GPUs, if the cluster counts memory. Without "
        "Slurm, SIZE is the memory limit of the run, if systemd can set such a limit.",
        places=EVERYWHERE,
        metavar="SIZE",
        sbatch="mem",
        written=True,
        asks="",
    ),
    Option(
        name="spare",
        kind="count",
        minimum=0,
        group="How many",
        rare=True,
        help="Number of extra nodes to allocate, which replace nodes that the check rejects. Default: 0.",
        places=EVERYWHERE,
        metavar="N",
        needs_slurm=True,
    ),
    # -- Slurm ----------------------------------------------------------------------------
    _directive(
        "time",
        "time",
        "Time limit of the job, for example 90 (minutes), 30m, 2h, 1d, HH:MM:SS or D-HH:MM:SS.",
        group="When and how long",
        short="t",
        environment="SBATCH_TIMELIMIT",
        metavar="TIME",
    ),
    _directive(
        "partition",
        "word",
        "Slurm partition to run in. Several partitions are separated by commas, and Slurm chooses one of them.",
        short="p",
        environment="SBATCH_PARTITION",
    ),
    _directive(
        "account", "word", "Slurm account that is charged for the job.", short="A", environment="SBATCH_ACCOUNT"
    ),
    _directive("qos", "word", "Slurm quality of service (QOS) of the job.", short="q", environment="SBATCH_QOS"),
    _directive(
        "constraint",
        "word",
        "Features that the nodes must have, for example 'a100&ib'.",
        short="C",
        environment="SBATCH_CONSTRAINT",
        metavar="FEATURES",
    ),
    _directive("reservation", "word", "Slurm reservation to run in.", rare=True, environment="SBATCH_RESERVATION"),
    _directive(
        "exclude", "word", "Nodes that the job must not get, for example n1,n[3-5].", short="x", metavar="NODES"
    ),
    Option(
        name="nodelist",
        kind="word",
        group="Where",
        rare=True,
        help="Nodes that the job must get, for example n1,n[3-5]. Slurm adds other nodes if --nodes is larger than "
        "this list.",
        places=PROJECT,
        metavar="NODES",
        sbatch="nodelist",
        short="w",
        written=True,
        needs_slurm=True,
        asks="",
    ),
    Option(
        name="dependency",
        kind="word",
        group="When and how long",
        rare=True,
        help="Jobs that this job waits for, in the form of sbatch, for example afterok:1234.",
        places=PROJECT,
        metavar="JOBS",
        sbatch="dependency",
        short="d",
        written=True,
        needs_slurm=True,
        asks="",
    ),
    Option(
        name="after",
        kind="texts",
        group="When and how long",
        help="Start the job when RUN has completed. If RUN fails, the job is cancelled. A RUN that has already "
        "failed is refused.",
        metavar="RUN",
        asks="",
    ),
    Option(
        name="comment",
        kind="text",
        group="Where",
        rare=True,
        help="Comment of the job. hpcenv appends `hpcenv:` and the fingerprint of the lockfile, so that Slurm's "
        "records name the environment of each job.",
        places=EVERYWHERE,
        metavar="TEXT",
        sbatch="comment",
        needs_slurm=True,
        asks="",
    ),
    Option(
        name="sbatch",
        kind="native",
        group="Where",
        help="Pass another option to sbatch, for example --sbatch mail-type=END. hpcenv.toml and site profiles have "
        "a table [sbatch] for such options.",
        places=EVERYWHERE,
        metavar="NAME[=VALUE]",
        needs_slurm=True,
        asks="sbatch gets it",
    ),
    Option(
        name="srun",
        kind="native",
        group="Where",
        rare=True,
        help="Pass another option to the srun that starts the training, for example --srun cpu-bind=none. hpcenv.toml "
        "and site profiles have a table [srun] for such options.",
        places=EVERYWHERE,
        metavar="NAME[=VALUE]",
        needs_slurm=True,
        asks="srun gets it",
    ),
    Option(
        name="retry_excluding",
        kind="count",
        group="Checks",
        rare=True,
        help="If the check rejects nodes, queue the job again without these nodes, at most N times.",
        metavar="N",
    ),
    Option(
        name="site",
        kind="text",
        group="Where",
        rare=True,
        help="Site profile to use: its name, its path, or `none`. Default: the profile that fits this cluster.",
        metavar="NAME",
        asks="the site profile of the run",
    ),
    Option(
        name="cluster",
        kind="choice",
        choices=("slurm", "local"),
        group="Where",
        help="Where to run: slurm, or local for this machine. Default: slurm if `sbatch` is on PATH.",
    ),
    Option(
        name="assume_shared",
        kind="flag",
        group="Where",
        help="Do not check that compute nodes can see the project, the run folder and the environment.",
        places=ONLY_PROJECT,
    ),
    # -- Launch ---------------------------------------------------------------------------
    Option(
        name="module",
        kind="flag",
        group="What runs",
        help="SCRIPT is the name of a Python module, for example package.train (torchrun -m).",
        letter="m",
        torchrun="module",
    ),
    Option(
        name="entry",
        kind="flag",
        group="What runs",
        help="SCRIPT is the name of a console script of the environment, for example axolotl or accelerate.",
    ),
    Option(
        name="launcher",
        kind="choice",
        choices=LAUNCHERS,
        group="What runs",
        help="What starts the ranks. torchrun: torchrun on each node. srun: one Slurm task for each rank. none: the "
        "program is started once on each node, and starts the ranks itself. ray: Ray runs on all nodes, and the "
        "program runs on the first node. Default: torchrun.",
        places=EVERYWHERE,
    ),
    Option(
        name="cpu_binding",
        kind="choice",
        choices=CPU_BINDINGS,
        group="What runs",
        help="Bind each rank to the CPUs near its GPU, if the machine lists them, or off. Also off if torchrun "
        "(--numa-binding) or srun (gpu-bind) binds the ranks. Default: near-gpu.",
        places=ALL_BUT_COMMAND,
    ),
    Option(
        name="expand",
        kind="flag",
        group="What runs",
        rare=True,
        help="Replace {master_addr}, {master_port}, {nnodes}, {node_rank} and similar names in ARGS, on each node. "
        "{{NAME}} becomes {NAME}.",
    ),
    Option(
        name="torchrun_args",
        kind="texts",
        group="What runs",
        rare=True,
        help="Pass one more argument to torchrun, for example --torchrun-args --monitor-interval=1.",
        metavar="ARG",
        asks="",
    ),
    # -- Environment ----------------------------------------------------------------------
    Option(
        name="rocm",
        kind="flag",
        group="Environment",
        help="For a torch built for ROCm: bring ROCm's libraries of the host into the container (apptainer --rocm). "
        "Libraries that need a newer C library than that of the image cannot load.",
        places=ALL_BUT_COMMAND,
    ),
    Option(
        name="lock",
        kind="text",
        group="Environment",
        help="Name of the lockfile to run with, and of [environment.NAME] in hpcenv.toml. Default: default.",
        metavar="NAME",
        default="default",
        asks="",
    ),
    Option(
        name="frozen",
        kind="flag",
        group="Environment",
        rare=True,
        help="Use the lockfile even if hpcenv.toml has changed since the lockfile was written.",
    ),
    Option(
        name="runtime",
        kind="text",
        group="Environment",
        rare=True,
        help="Program that starts containers, by path or by name: Apptainer or SingularityCE 4. Default: the "
        "program that the site profile names, else apptainer or singularity on PATH.",
        places=PROJECT,
        metavar="PROGRAM",
        asks="a program that is started here and on the nodes",
    ),
    Option(
        name="bind",
        kind="texts",
        group="Environment",
        help="Bind a folder or file of the nodes into the container: SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro.",
        metavar="SRC[:DST[:ro]]",
        asks="the ranks can use it: read and write, or only read if it ends with :ro",
    ),
    Option(
        name="env",
        kind="variables",
        group="Environment",
        help="Set an environment variable for the ranks. The value is literal text.",
        metavar="NAME=VALUE",
        asks="programs of the ranks load other code because of it",
    ),
    Option(
        name="pass_env",
        kind="texts",
        group="Environment",
        help="Pass a variable of the job's environment to the ranks. `HF_*` passes all names that begin with HF_.",
        places=PROJECT,
        metavar="NAME",
        asks="the ranks get this variable of yours",
    ),
    Option(
        name="secret",
        kind="secrets",
        group="Environment",
        help="Set a variable for the ranks to a secret. SOURCE is file:PATH or env:VARIABLE; only the nodes read the "
        "value.",
        metavar="NAME=SOURCE",
        asks="its value is read, and the ranks get it",
    ),
    Option(
        name="setup",
        kind="texts",
        group="Environment",
        help="Lines for the shell of the batch script. They run once, on the batch node, before the check, and a line "
        "that fails ends the job with 94. Their variables reach the ranks only by [env] or `pass-env`.",
        places=ALL_BUT_COMMAND,
        metavar="LINE",
        asks="it runs in the shell of the batch script, outside the container",
    ),
    # -- Checks ---------------------------------------------------------------------------
    Option(
        name="preflight",
        kind="choice",
        choices=("quick", "full", "off"),
        group="Checks",
        help="Which checks of the nodes run before the training: quick (about a second), full (also in the "
        "container, and a smoke test over all nodes) or off. Default: quick.",
        places=EVERYWHERE,
    ),
    Option(
        name="skip_check",
        kind="texts",
        group="Checks",
        help="Do not run this check, for example gpu.persistence. docs/reference/checks.md lists the checks.",
        places=EVERYWHERE,
        metavar="ID",
        asks="",
    ),
    Option(
        name="determinism",
        kind="choice",
        choices=DETERMINISM_PROFILES,
        group="Environment",
        help="How exactly another run must repeat this one. off: not at all. seeded: with seeds and deterministic "
        "kernels, and with a warning if torch has no deterministic kernel for an operation. bitwise: to the last "
        "bit, or the run ends with an error. Default: the profile in the lockfile.",
    ),
    Option(
        name="seed",
        kind="count",
        minimum=0,
        group="Environment",
        help="Base seed of the ranks. With --determinism off, N only sets seeds, and hpcenv does not change kernels. "
        "Default: `seed` under [determinism].",
        metavar="N",
    ),
    Option(
        name="hash_parameters_every",
        kind="count",
        minimum=0,
        group="Environment",
        rare=True,
        help="Record a hash of all parameters after each N-th optimizer step. Default: only at the end.",
        metavar="N",
    ),
    Option(
        name="record_metrics",
        kind="switch",
        group="Environment",
        help="Record the loss of every rank and optimizer step to the last bit, without a change of the script.",
        places=PROJECT - ONLY_COMMAND,
    ),
    Option(
        name="trace_steps",
        kind="steps",
        group="Environment",
        rare=True,
        help="Record each operation of torch in the optimizer steps A to B, with hashes of its inputs and outputs, for "
        "`hpcenv compare --explain-op`. These steps take longer.",
        metavar="A:B",
    ),
    # -- Stop and requeue -----------------------------------------------------------------
    Option(
        name="stop_after_steps",
        kind="count",
        group="When and how long",
        rare=True,
        help="End the training with status 0 after N optimizer steps, for example to compare only the first steps "
        "of two runs.",
        metavar="N",
    ),
    Option(
        name="grace",
        kind="seconds",
        group="When and how long",
        rare=True,
        help="How long before the time limit the ranks get the signal to save and end, for example 90 (seconds), "
        "10m or 1h. "
        "Default: 60 seconds, but at most a tenth of --time.",
        places=PROJECT,
        metavar="TIME",
        sbatch="signal",
    ),
    Option(
        name="idle_end",
        kind="seconds",
        group="When and how long",
        rare=True,
        help="End the run when it has used no GPU and no CPU for this time, for example 30m or 2h. With 0, hpcenv "
        "does not end idle runs. "
        "Default: 0.",
        places=EVERYWHERE,
        metavar="TIME",
    ),
    Option(
        name="stop_signal",
        kind="choice",
        choices=SIGNALS,
        group="When and how long",
        rare=True,
        help="Signal that tells the ranks to save and end. Default: USR2.",
        places=PROJECT,
    ),
    Option(
        name="requeue",
        kind="choice",
        choices=("saved", "always", "never"),
        group="When and how long",
        help="Whether a job that had to stop is queued again: saved (only if the ranks saved their state), always "
        "or never. Default: saved.",
        places=PROJECT,
        sbatch="requeue",
    ),
    Option(
        name="max_requeues",
        kind="count",
        minimum=0,
        group="When and how long",
        help="How often the job is queued again at most. Default: 20.",
        places=ONLY_PROJECT,
        metavar="N",
    ),
    Option(
        name="resume_from",
        kind="text",
        group="What runs",
        help="Continue from a checkpoint of another run: the name of the run (its newest checkpoint), or the path of a "
        "checkpoint. In the script, `hpcenv.training.resume_path()` returns the path of this checkpoint.",
        metavar="RUN|PATH",
        asks="the ranks read this checkpoint",
    ),
    # -- Code -----------------------------------------------------------------------------
    Option(
        name="workdir",
        kind="choice",
        choices=("copy", "live"),
        group="What runs",
        help="Where the script runs: in the run's own copy of the project (the default), or in the live project, "
        "where later edits change the job.",
        places=PROJECT,
    ),
    Option(
        name="include",
        kind="texts",
        group="What runs",
        rare=True,
        help="Also copy and hash the files that match this pattern, for example '*.npz'. The files may be large, of "
        "any kind, and ignored by git. A bundle of the run contains these files.",
        places=PROJECT,
        metavar="PATTERN",
        asks="files that fit are copied into the run folder, also those that git ignores",
    ),
    Option(
        name="allow_dirty",
        kind="flag",
        group="What runs",
        help="Submit code that has uncommitted changes. The run records the changes.",
    ),
    # -- Many runs ------------------------------------------------------------------------
    Option(
        name="sweep",
        kind="texts",
        group="Many runs",
        help="Submit one run for each value, for example lr=1e-3,1e-4 or seed=0..4. Several --sweep options give "
        "all combinations of their values.",
        places=ONLY_COMMAND,
        metavar="NAME=V1,V2",
        asks="",
    ),
    Option(
        name="array",
        kind="text",
        group="Many runs",
        help="Submit one run for each index, for example 0-9. The ranks read their index from HPCENV_ELEMENT.",
        places=ONLY_COMMAND,
        metavar="INDICES",
        sbatch="array",
        short="a",
        asks="",
    ),
    Option(
        name="max_parallel",
        kind="count",
        group="Many runs",
        rare=True,
        help="With --sweep or --array: how many runs may be active at the same time.",
        places=ONLY_COMMAND,
        metavar="N",
    ),
    Option(
        name="chain",
        kind="count",
        group="When and how long",
        help="Submit N jobs that run one after the other and continue the same run.",
        metavar="N",
    ),
    # -- Staging --------------------------------------------------------------------------
    Option(
        name="stage",
        kind="flag",
        group="Staging",
        rare=True,
        help="Copy the SIF to the local disk of every node before the nodes use the SIF.",
    ),
    Option(
        name="stage_data",
        kind="texts",
        group="Staging",
        rare=True,
        help="Copy this folder to the local disk of every node. The script sees the copy at the same path.",
        metavar="DIR",
        asks="it is copied to the nodes, and the ranks can read it",
    ),
    Option(
        name="stage_dir",
        kind="text",
        group="Staging",
        rare=True,
        help="Folder on the nodes for the copies. Default: the first local disk that all nodes have.",
        metavar="DIR",
        asks="hpcenv writes there",
    ),
    Option(
        name="stage_limit",
        kind="size",
        group="Staging",
        help="How much space the copies may take on a node, for example 200G. Default: 100G.",
        places=ONLY_PROJECT,
        metavar="SIZE",
    ),
    # -- Output ---------------------------------------------------------------------------
    Option(
        name="name",
        kind="text",
        group="Submit and follow",
        help="Name of the run and of its folder. Default: the name of the script with date and time.",
        sbatch="job-name",
        short="J",
        asks="",
    ),
    Option(
        name="runs_dir",
        kind="text",
        group="Submit and follow",
        rare=True,
        help="Folder that holds the runs. Default: `runs` under [paths] in hpcenv.toml.",
        metavar="DIR",
        asks="hpcenv writes there",
    ),
)

BY_NAME = {option.name: option for option in OPTIONS}


def in_place(place: OptionPlace) -> tuple[Option, ...]:
    """Return the options that can be set in one place, in the order of the table."""
    return tuple(option for option in OPTIONS if place in option.places)


WRITTEN = tuple(option for option in OPTIONS if option.written)
