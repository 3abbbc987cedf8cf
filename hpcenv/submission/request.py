"""The options of one submission: read them, and merge them with hpcenv.toml, SBATCH_* variables and the site profile.

Runs on: LOGIN NODE. The table of options is in project/options.py.
"""

from __future__ import annotations

import difflib
import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpcenv.errors import Command, Hint, SubmitRejected, UsageError
from hpcenv.judge.checks.check_table import BY_ID as CHECKS_BY_ID
from hpcenv.judge.checks.check_table import at_level
from hpcenv.project import option_values
from hpcenv.project.fields import FieldLevel
from hpcenv.project.gone_options import without_gone
from hpcenv.project.option_types import OptionValues
from hpcenv.project.option_values import OptionValue
from hpcenv.project.options import BY_NAME, OPTIONS, WRITTEN, Option, in_place
from hpcenv.project.site_profile import Profile
from hpcenv.project.workspace import Workspace
from hpcenv.records.codec import SCHEMA
from hpcenv.records.manifest import LaunchOptions, PreflightOptions, SmokeOptions, StopOptions
from hpcenv.records.request import RequestRecord
from hpcenv.records.session import SessionOptions
from hpcenv.submission import launch_options as launch_rules
from hpcenv.submission.plan import Call, Request
from hpcenv.submission.ray_options import require_for_ray

_HELP = Command("hpcenv", "submit", "--help")
_IN_PYTHON = "docs/reference/options.md lists the keywords: `--gpu-type` is `gpu_type=`"

Cluster = Literal["slurm", "local"]


@dataclass(frozen=True, kw_only=True)
class CopiedCode:
    """The copy of a run's code, which is the source of another run.

    Attributes:
        root: the folder of the copy.
        files: the files of the copy's list that exist, relative to `root`. hpcenv uses these files as the tracked
            files. It does not ask git, even if `root` is in a git work tree.
    """

    root: Path
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(OptionValues):
    """The input of a submission: the options of the table, and the program that torchrun starts.

    Attributes:
        script: the program that torchrun starts; None if the job only checks its nodes (`hpcenv verify --nodes`).
        args: arguments of the script, passed on unchanged.
        level: how many details of the environment the nodes compare; None for the default level of this kind of
            environment.
        call: a Python function instead of a script.
        lockfile: path of the lockfile, with priority over `lock`.
        copied: the copy of another run's code, if the new run uses this copy as its project; else None.
        handover: whether the run folder is made for another person, who has different variables and files.
        allocated: whether the job already has its nodes (`hpcenv run` in an allocation). If so, nothing is requested.
        site_here: whether the site profile is used even without a job (`hpcenv run` on a login node).
        session: the options of a session, which has no script; None if the run is not a session.
    """

    script: str | None
    args: tuple[str, ...] = ()
    level: FieldLevel | None = None
    call: Call | None = None
    lockfile: Path | None = None
    copied: CopiedCode | None = None
    handover: bool = False
    allocated: bool = False
    site_here: bool = False
    session: SessionOptions | None = None

    @property
    def trains(self) -> bool:
        """Whether the job starts a training or is a session. If it does not, the job only checks its nodes."""
        return self.script is not None or self.call is not None or self.session is not None


# -- where options enter ------------------------------------------------------------------


def from_command_line(script: str, args: Sequence[str], values: Mapping[str, object]) -> SubmitOptions:
    """Return the options of a command line.

    Args:
        values: option name -> text or texts; None if the option is not given.

    Raises:
        UsageError: values are not valid. The error lists all of them.
    """
    return SubmitOptions(script=script, args=tuple(args), **parse_flags(values))


def parse_flags(values: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of options on a command line, by option name.

    Raises:
        UsageError: values are not valid. The error lists all of them.
    """
    return _parse({name: (value, BY_NAME[name].flag) for name, value in values.items()})


def from_keywords(script: str | None, args: Sequence[object], keywords: Mapping[str, object]) -> SubmitOptions:
    """Return the options that a Python program gave to `hpcenv.submit`.

    Args:
        args: arguments of the script. Each argument is converted with `str()`.
        keywords: option name -> value; None if the option is not given.

    Raises:
        UsageError: a keyword is unknown, or values are not valid.
    """
    if isinstance(args, str):
        raise UsageError("`args` is one text", hint=f"a list of texts: {shlex.split(args)!r}")
    return SubmitOptions(script=script, args=tuple(str(word) for word in args), **parse_keywords(keywords))


def parse_keywords(keywords: Mapping[str, object]) -> dict[str, Any]:
    """Return the values of keyword arguments in Python, by option name.

    Raises:
        UsageError: a keyword is unknown, or values are not valid.
    """
    known = {option.name: option for option in in_place("python")}
    for name in keywords:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "docs/reference/options.md lists the options"
            raise UsageError(f"`{name}` is not an option of a submission", hint=hint)
    return _parse({name: (_plain(value), name) for name, value in keywords.items()}, _IN_PYTHON)


def _plain(value: object) -> object:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _parse(values: Mapping[str, tuple[object, str]], hint: Hint = _HELP) -> dict[str, Any]:
    """Return the parsed values of options.

    Args:
        values: option name -> its value, and the origin of the value.
        hint: where the user finds a description of the options.

    Raises:
        UsageError: values are not valid. The error has one line for each wrong value.
    """
    parsed: dict[str, OptionValue] = {}
    problems = []
    for name, (value, origin) in values.items():
        option = BY_NAME[name]
        try:
            parsed[name] = option_values.parse(option, value)
        except ValueError as error:
            shown = f"`{option.key}`" if isinstance(value, (list, tuple, Mapping)) else f"`{option.key}` = {value!r}"
            problems.append(f"{shown}: {error} (from {origin})")
    if problems:
        raise UsageError("this cannot be submitted", why="\n".join(problems), hint=hint)
    return parsed


def command_of(options: SubmitOptions) -> tuple[str, ...]:
    """Return the command line that gives these options."""
    words = [
        word for option in in_place("command") for word in option_values.argv_of(option, value_of(options, option))
    ]
    args = ("--", *options.args) if options.args else ()
    return ("hpcenv", "submit", options.script or "", *words, *args)


def value_of(options: OptionValues, option: Option) -> OptionValue:
    """Return the value of one option."""
    value: OptionValue = getattr(options, option.name)
    return value


# -- merging ------------------------------------------------------------------------------


def detect_cluster(environ: Mapping[str, str]) -> Cluster:
    """Return `slurm` if sbatch is on PATH, else `local`."""
    return "slurm" if shutil.which("sbatch", path=environ.get("PATH")) else "local"


@dataclass(frozen=True, kw_only=True)
class MergedOptions:
    """The values of all options, merged from command line, project, site profile and defaults.

    Attributes:
        origins: option name -> the origin of its value. Options that are not set have no entry.
        notes: what the user should know about the origins.
    """

    options: SubmitOptions
    origins: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def requested(self) -> tuple[str, ...]:
        """Return the options that request something from Slurm, each with its value and origin."""
        rows = (option for option in OPTIONS if option.needs_slurm or option.name in ("nodes", "gpus", "cpus", "mem"))
        return tuple(self.shown(option) for option in rows if option.name in self.origins)

    def shown(self, option: Option) -> str:
        """Return an option with its value and origin."""
        value = value_of(self.options, option)
        text = (
            shlex.join(option_values.argv_of(option, value)) if option.kind == "native" else f"{option.name} = {value}"
        )
        return f"{text} ({self.origins[option.name]})"


def merge(
    options: SubmitOptions,
    workspace: Workspace,
    environ: Mapping[str, str],
    cluster: Cluster,
    profile: Profile | None,
) -> MergedOptions:
    """Merge the given options, hpcenv.toml, the user's SBATCH_* variables and the site profile, in this precedence.

    Raises:
        UsageError: a value is not valid.
    """
    chosen = {
        option.name: _joined(option, candidates)
        for option in OPTIONS
        if (candidates := list(_candidates(option, options, workspace, environ if cluster == "slurm" else {}, profile)))
    }
    values = _parse(chosen)
    origins = {name: origin for name, (_value, origin) in chosen.items()}
    merged = MergedOptions(options=replace(options, **values), origins=origins)
    return replace(merged, notes=tuple(_notes(merged, environ, cluster)))


def _candidates(
    option: Option, options: SubmitOptions, workspace: Workspace, environ: Mapping[str, str], profile: Profile | None
) -> Iterator[tuple[Any, str]]:
    """Yield the values that are given for an option, each with its origin. The first value has precedence."""
    table = f"[{option.name if option.kind == 'native' else 'submit'}] in {workspace.spec}"
    places: list[tuple[Any, str]] = [
        (getattr(options, option.name), option.flag),
        (_of_project(option, workspace), table),
        (environ.get(option.environment) or None if option.environment else None, option.environment),
        (None if profile is None else profile.default_of(option.name), "" if profile is None else profile.path),
    ]
    for value, origin in places:
        if value is not None and value != option.absent:
            yield value, origin


def _of_project(option: Option, workspace: Workspace) -> Any:
    if "project" not in option.places:
        return None
    table = workspace.project if option.kind == "native" else workspace.project.submit
    return getattr(table, option.name)


def _joined(option: Option, candidates: Sequence[tuple[Any, str]]) -> tuple[Any, str]:
    """Return the value that is used, and its origin. The first value is used; lists and tables are joined."""
    if option.kind == "texts":
        # The values from the project come before the values on the command line, as if the user had typed them first.
        value: Any = tuple(item for given, _origin in reversed(candidates) for item in given)
    elif option.kind == "native":
        value = {}
        for given, _origin in reversed(candidates):
            value |= given
    else:
        return candidates[0]
    return value, ", ".join(origin for _given, origin in candidates)


def _notes(merged: MergedOptions, environ: Mapping[str, str], cluster: Cluster) -> Iterator[str]:
    for option in OPTIONS:
        if option.environment and merged.origins.get(option.name) == option.environment:
            yield f"{option.name} = {value_of(merged.options, option)} comes from {option.environment}"
    if cluster == "slurm":
        known = {option.environment for option in OPTIONS}
        ignored = sorted(name for name in environ if name.startswith("SBATCH_") and name not in known)
        if ignored:
            yield f"not used, because they would change the job without a trace in its script: {', '.join(ignored)}"
        return
    unused = [merged.shown(option) for option in OPTIONS if option.needs_slurm and option.name in merged.origins]
    if unused:
        yield f"without Slurm these options have no effect: {', '.join(unused)}"


def make_request(options: SubmitOptions) -> Request:
    """Return what is requested from Slurm.

    Args:
        options: the merged options.

    Raises:
        UsageError: neither the number of GPUs nor the number of ranks is given.
    """
    gpus = options.gpus or 0
    nproc = options.nproc if options.nproc is not None else gpus
    if options.session is not None or (options.launcher == "ray" and not gpus):
        nproc = 1
    if nproc == 0:
        missing = "neither --gpus nor" if options.gpus is None else "there is a rank for each GPU, --gpus is 0, and no"
        raise UsageError(
            "the number of ranks per node is not known",
            why=f"{missing} --nproc is given, here or in [submit] of hpcenv.toml",
            hint="--nodes N --gpus G, or --gpus 0 --nproc R for CPU ranks",
        )
    written: dict[str, Any] = {option.name: getattr(options, option.name) for option in WRITTEN}
    return Request(
        nodes=1 if options.nodes is None else options.nodes,
        gpus_per_node=gpus,
        nproc_per_node=nproc,
        cpus_per_task=options.cpus,
        gpu_request=options.gpu_request or "gpus-per-node",
        gpu_type=options.gpu_type,
        spare=options.spare or 0,
        comment=options.comment,
        rocm=bool(options.rocm),
        sbatch=options.sbatch,
        srun=options.srun,
        **written,
    )


def require_literal(options: SubmitOptions) -> None:
    """Refuse text that cannot be passed to a program: text with a NUL, or with a surrogate that represents no byte."""
    words = {f"argument {n} of the script": word for n, word in enumerate(options.args, start=1)}
    words |= {f"--torchrun-args word {n}": word for n, word in enumerate(options.torchrun_args, start=1)}
    words |= {"the script": options.script or "", **{f"--env {name}": value for name, value in options.env.items()}}
    for what, word in words.items():
        try:
            fits = b"\0" not in os.fsencode(word)
        except UnicodeEncodeError:
            fits = False
        if not fits:
            raise UsageError(f"{what} is {word!r}, which cannot be passed to a program")


def require_one_kind(options: SubmitOptions, cluster: Cluster) -> None:
    """Refuse options that contradict each other. If the run is on this machine, refuse also options that need Slurm."""
    if options.module and options.entry:
        raise UsageError(
            "`--module` and `--entry` contradict each other", why="SCRIPT is either a module or a console script"
        )
    if options.chain is not None and (options.sweep or options.array is not None):
        raise UsageError(
            "`--chain` is for one run",
            why="a sweep or array has many runs",
            hint="submit each run of the sweep as a separate chain",
        )
    if options.sweep and options.array is not None:
        raise UsageError("`--sweep` and `--array` contradict each other", hint="--sweep NAME=0..9 gives both")
    if options.max_parallel is not None and not options.sweep and options.array is None:
        raise UsageError("`--max-parallel` is for a sweep or array", hint="--sweep NAME=V1,V2 or --array 0-9")
    if cluster == "local" and options.setup and not options.site_here:
        raise UsageError(
            "`setup` needs Slurm",
            why="its lines run in the batch script, and a run on this machine has no batch script (--cluster local)",
            hint="type the lines in this shell, and leave `setup` out",
        )
    for line in options.setup:
        if not line.isprintable():
            raise UsageError(f"a line of `setup` is not one line of text: {line!r}", hint="write each line by itself")
    several = "--chain" if options.chain is not None else "--sweep" if options.sweep else "--array"
    if cluster == "local" and (options.chain is not None or options.sweep or options.array is not None):
        raise UsageError(f"`{several}` needs Slurm", why="on this machine one run is started at once (--cluster local)")


def launch_options(options: SubmitOptions, *, torch: str = "") -> LaunchOptions:
    """Return how the ranks are started.

    Args:
        torch: the locked version of torch; empty if it is not known.

    Raises:
        UsageError: options contradict each other, or would break the launch.
        SubmitRejected: torchrun would start the ranks, and the locked environment has no torch.
    """
    if options.session is not None:
        return LaunchOptions(launcher="none")
    launcher = options.launcher or "torchrun"
    launch_rules.check_launcher(launcher, options.torchrun_args)
    if launcher == "ray":
        require_for_ray(options)
    launch_rules.check_torchrun_args(options.torchrun_args, torch=torch)
    if options.expand:
        launch_rules.check_expand(options.args)
    chosen = launcher if options.call is None else options.call.launcher
    if chosen == "torchrun" and torch == "absent" and options.trains:
        raise SubmitRejected(
            "the locked environment has no torch, and torchrun is a program of torch",
            hint="--launcher none starts your program once on each node, --launcher srun once for each rank",
        )
    return LaunchOptions(
        launcher=chosen,
        torchrun_args=options.torchrun_args,
        # Each node expands the arguments in the job. With spare nodes, the nodes that train are known only after the
        # check.
        expand=options.expand,
        cpu_binding="off"
        if launcher == "ray"
        else launch_rules.cpu_binding(options.cpu_binding, options.torchrun_args, options.srun),
    )


def stop_options(options: SubmitOptions, request: Request) -> StopOptions:
    """Return the options for a job that must end before the training has ended.

    Args:
        options: the merged options.

    Raises:
        UsageError: the grace period is not shorter than the time limit of the job.
    """
    if options.session is not None:
        # Slurm would send the signal to all steps of the job, and the signal would end each shell. At the time limit,
        # Slurm sends TERM.
        return StopOptions(grace=0, requeue="never")
    default = StopOptions()
    seconds = None if request.time_minutes is None else request.time_minutes * 60
    if options.grace is not None and seconds is not None and options.grace >= seconds:
        raise UsageError(
            f"a grace period of {options.grace} s in a job of {seconds:g} s",
            why="the ranks would get the stop signal as soon as they begin",
            hint="a longer --time, or a shorter --grace",
        )
    # A tenth of the time of a short job is enough to save the state of the training.
    usual = default.grace if seconds is None else min(default.grace, int(seconds // 10))
    return StopOptions(
        signal=options.stop_signal or default.signal,
        grace=usual if options.grace is None else options.grace,
        requeue=options.requeue or default.requeue,
        max_requeues=default.max_requeues if options.max_requeues is None else options.max_requeues,
    )


def smoke_options(options: SubmitOptions) -> SmokeOptions | None:
    """Return the smoke test of a run; None if the preflight level has no smoke test, or if its checks are all skipped.

    Args:
        options: the merged options.
    """
    if not at_level(preflight_options(options), gpus=True, places=("smoke",)):
        return None
    return SmokeOptions()


def preflight_options(options: SubmitOptions) -> PreflightOptions:
    """Return which checks run on the nodes.

    Args:
        options: the merged options.

    Raises:
        UsageError: `--skip-check` names a check that does not exist.
    """
    for name in options.skip_check:
        if name not in CHECKS_BY_ID:
            close = difflib.get_close_matches(name, CHECKS_BY_ID, n=1)
            hint = f"did you mean `{close[0]}`?" if close else "docs/reference/checks.md lists the checks"
            raise UsageError(f"there is no check `{name}`", why="--skip-check, or skip-check in a file", hint=hint)
    return PreflightOptions(
        level=options.preflight or "quick",
        skipped=tuple(dict.fromkeys(options.skip_check)),
        allow_cpu_torch=options.allow_cpu_torch,
    )


def passed_variables(options: SubmitOptions) -> tuple[str, ...]:
    """Return the variables of the job's environment that the ranks see.

    Raises:
        UsageError: a text is not the name of a variable.
    """
    launch_rules.check_pass_env(options.pass_env)
    return tuple(dict.fromkeys(options.pass_env))


# -- the record of a request --------------------------------------------------------------


def to_record(options: SubmitOptions) -> RequestRecord | None:
    """Return the stored request of a run; None if there is no script to run again."""
    if options.script is None or options.handover:
        return None
    given = ((option, value_of(options, option)) for option in OPTIONS)
    values: dict[str, Any] = {
        option.name: dict(value) if isinstance(value, Mapping) else value
        for option, value in given
        if value != option.absent
    }
    return RequestRecord(schema=SCHEMA, script=options.script, args=options.args, options=values)


def from_record(record: RequestRecord) -> SubmitOptions:
    """Return the stored options of a run, without options that were removed from hpcenv.

    Raises:
        UsageError: this version of hpcenv does not know an option, or a value is not valid.
    """
    options, _notes = without_gone(record.options)
    unknown = sorted(set(options) - set(BY_NAME))
    if unknown:
        raise UsageError(
            "this version of hpcenv cannot submit the run again",
            why=f"request.json of the run has options that it does not know: {', '.join(unknown)}",
        )
    values = _parse({name: (value, "request.json") for name, value in options.items()})
    return SubmitOptions(script=record.script, args=record.args, **values)
