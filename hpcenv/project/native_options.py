"""Options of sbatch and srun that users pass on by name: `--sbatch NAME[=VALUE]`, `--srun NAME[=VALUE]`.

Runs on: LOGIN NODE. Pure. This module refuses options that hpcenv sets itself, and names the reason and hpcenv's own
option. Slurm refuses options that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hpcenv.project.options import OPTIONS

# The value of an option; None for an option without a value.
NativeOptions = Mapping[str, str | None]

_ONE_TASK = "hpcenv starts one task on each node; the ranks are --nproc"
_GPUS = "the GPUs of each node are --gpus and --gpu-type"
_LOG = "the log of a run is job.log in its folder"
_VARIABLES = "the variables of the ranks are --env, --pass-env and --secret"
_ANSWER = "hpcenv reads what the command prints"
_CONTAINER = "the lockfile names the container, and hpcenv starts it"
_STOP = "hpcenv decides how a run stops: --grace, --stop-signal and --requeue"
_PROGRAM = "the program would run outside the environment that the lockfile names"

_BOTH = {
    **dict.fromkeys(
        ("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-socket", "ntasks-per-core", "ntasks-per-gpu"),
        _ONE_TASK,
    ),
    **dict.fromkeys(("gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "tres-per-task"), _GPUS),
    "cpus-per-gpu": "the CPUs of each node are --cpus",
    "nodefile": "the nodes are --nodelist",
    **dict.fromkeys(("output", "error", "input", "open-mode"), _LOG),
    "chdir": "the job starts in the folder of the run",
    **dict.fromkeys(("export", "export-file", "get-user-env"), _VARIABLES),
    "signal": _STOP,
    "no-kill": "a run ends when one of its nodes fails; --requeue says what happens then",
    **dict.fromkeys(("quiet", "verbose", "help", "usage", "version"), _ANSWER),
    "test-only": "hpcenv has its own option: --test-only",
    **dict.fromkeys(("container", "container-id"), _CONTAINER),
    "clusters": "hpcenv reads the state of a job from one cluster",
    **dict.fromkeys(("uid", "gid"), "the run belongs to you"),
}

_SBATCH = {
    **_BOTH,
    **dict.fromkeys(("requeue", "no-requeue"), _STOP),
    "wait": "hpcenv has its own option: --wait",
    "wait-all-nodes": "the check needs all nodes of the job at once",
    "wrap": "the job is the script that you submit",
    "parsable": _ANSWER,
    "ignore-pbs": "hpcenv writes all directives of the script",
}

_SRUN = {
    **_BOTH,
    **dict.fromkeys(("kill-on-bad-exit", "wait"), "hpcenv ends all nodes when one has failed"),
    "licenses": "they belong to the whole job: --sbatch licenses=LIST",
    "gres": "they belong to the whole job: --sbatch gres=LIST",
    "unbuffered": "hpcenv sets it, so that the log shows each line at once",
    "label": "hpcenv writes the rank before each line",
    "time": "the time limit belongs to the whole job: --time",
    "job-name": "hpcenv names its job steps check, stage and launch",
    **dict.fromkeys(("pty", "multi-prog", "bcast", "preserve-env", "relative", "jobid", "het-group"), _ONE_TASK),
    **dict.fromkeys(("prolog", "epilog", "task-prolog", "task-epilog"), _PROGRAM),
}

# Long options of sbatch and srun that hpcenv can pass on (sbatch(1) and srun(1) of Slurm 24.11). With this list, hpcenv
# recognises such an option if the user forgets --sbatch or --srun before it. Options that are not in this list can be
# passed on, too.
_KNOWN_TO_SBATCH = frozenset(
    (
        "acctg-freq", "batch", "bb", "bbf", "begin", "cluster-constraint", "comment", "contiguous", "core-spec",
        "cores-per-socket", "cpu-freq", "deadline", "delay-boot", "distribution", "exclusive", "extra",
        "extra-node-info", "gpu-bind", "gpu-freq", "gres-flags", "hint", "hold", "kill-on-invalid-dep", "licenses",
        "mail-type", "mail-user", "mcs-label", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network",
        "nice", "overcommit", "oversubscribe", "power", "prefer", "priority", "profile", "propagate", "reboot",
        "segment", "sockets-per-node", "spread-job", "stepmgr", "switches", "thread-spec", "threads-per-core",
        "time-min", "tmp", "tres-bind", "use-min-nodes", "wckey",
    )
)  # fmt: skip
_KNOWN_TO_SRUN = frozenset(
    (
        "accel-bind", "cpu-bind", "exact", "mpi", "overlap", "resv-ports", "slurmd-debug", "treewidth",
    )
)  # fmt: skip

_NAME = re.compile(r"[a-z][a-z0-9-]*")


def program_of(name: str) -> str | None:
    """Return the program that has this long option: `sbatch` or `srun`; None if no list above has this option.

    Args:
        name: the name of the option, without dashes in front.
    """
    if name in _KNOWN_TO_SBATCH:
        return "sbatch"
    return "srun" if name in _KNOWN_TO_SRUN else None


def owned(program: str) -> Mapping[str, str]:
    """Return the options of `sbatch` or `srun` that users cannot pass on: name -> reason."""
    own: dict[str, str] = {}
    for option in OPTIONS:
        if option.sbatch and (program == "sbatch" or option.sbatch != option.srun):
            where = "hpcenv has its own option" if program == "sbatch" else "it belongs to the whole job"
            own[option.sbatch] = f"{where}: {option.flag}"
        if option.srun:
            own[option.srun] = f"hpcenv has its own option: {option.flag}"
    return {**own, **(_SBATCH if program == "sbatch" else _SRUN)}


def short_spellings() -> Mapping[str, str]:
    """Return the one-letter options of sbatch for which hpcenv has an option: letter -> hpcenv's option."""
    return {option.short: option.flag for option in OPTIONS if option.short}


def check(program: str, name: str, value: str | None) -> None:
    """Refuse an option that cannot be passed on.

    Args:
        program: `sbatch` or `srun`.
        name: the name of the option, without dashes in front.
        value: None for an option without a value.

    Raises:
        ValueError: the option cannot be passed on. The message gives the reason.
    """
    plain = name.lstrip("-")
    if len(plain) == 1:
        flag = short_spellings().get(plain)
        raise ValueError(f"hpcenv has its own option: {flag}" if flag else f"use the long name of -{plain}")
    if plain != name:
        raise ValueError(f"leave out the dashes: --{program} {plain}" + ("" if value is None else f"={value}"))
    if not _NAME.fullmatch(name):
        raise ValueError("is not the name of an option: small letters, digits and `-`")
    # sbatch and srun accept the beginning of a name as the whole name (getopt_long(3)).
    for known, reason in owned(program).items():
        if known == name:
            raise ValueError(reason)
    for known, reason in owned(program).items():
        if known.startswith(name):
            raise ValueError(f"{program} would read it as --{known}, and {reason}")
    if value is not None and not value.isprintable():
        raise ValueError("the value has a newline or another control character")
    if name == "gres" and (value is None or any(map(is_gpu_gres, value.split(",")))):
        raise ValueError(f"other resources than GPUs, as in gres=nvme:100; {_GPUS}")
    if value is not None and program == "sbatch" and re.search(r"[\"'\\]", value):
        raise ValueError("the value has a quote or a backslash, which sbatch reads in its own way")


def is_gpu_gres(item: str) -> bool:
    """Return whether an item of `--gres` requests a GPU or a part of a GPU (gres.conf(5), Slurm 24.11)."""
    return re.split("[:=]", item.removeprefix("gres/").removeprefix("gres:"), maxsplit=1)[0] in ("gpu", "shard", "mps")


def parse(program: str, value: object) -> NativeOptions:
    """Return the options to pass on, as name -> value, from texts `NAME[=VALUE]` or from a table.

    Raises:
        ValueError: one of the options cannot be passed on.
    """
    pairs = _from_table(value) if isinstance(value, Mapping) else _from_texts(value)
    for name, text in pairs.items():
        try:
            check(program, name, text)
        except ValueError as error:
            raise ValueError(f"`{name}`: {error}") from error
    return pairs


def _from_texts(value: object) -> dict[str, str | None]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError("must be a table of NAME = VALUE")
    found: dict[str, str | None] = {}
    for text in value:
        name, equals, rest = str(text).partition("=")
        if name in found:
            raise ValueError(f"`{name}` is given twice")
        found[name] = rest if equals else None
    return found


def _from_table(value: Mapping[object, object]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name, content in value.items():
        if content is True or content is None:
            found[str(name)] = None
        elif isinstance(content, (str, int)) and not isinstance(content, bool):
            found[str(name)] = str(content)
        else:
            raise ValueError(f"`{name}` = {content!r}: must be a text, a whole number or true")
    return found


def options_of(native: NativeOptions) -> list[str]:
    """Return the options as arguments of a command."""
    return [f"--{name}" if value is None else f"--{name}={value}" for name, value in native.items()]
