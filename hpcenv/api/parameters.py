"""The parameters of `hpcenv.Executor`: all parameters of `submitit.SlurmExecutor`, and the keywords of `hpcenv.submit`.

Runs on: LOGIN NODE. Pure.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcenv.errors import UsageError
from hpcenv.project.native_options import is_gpu_gres
from hpcenv.project.options import OPTIONS

# submitit writes these parameters into its batch script. Here hpcenv writes the batch script.
_REFUSED = {
    "teardown": "hpcenv writes the batch script; let the function clean up",
    "use_srun": "hpcenv starts each of its steps with srun",
}
# Parameters of submitit that have another name in hpcenv.
_OTHER_NAMES = {
    "job_name": "name",
    "num_gpus": "gpus",
    "gpus_per_node": "gpus",
    "signal_delay_s": "grace",
    "array_parallelism": "max_parallel",
}
_SAME_NAMES = (
    "partition",
    "qos",
    "account",
    "constraint",
    "exclude",
    "nodelist",
    "dependency",
    "nodes",
    "mem",
    "time",
    "comment",
    "setup",
)
# sbatch options without a keyword.
_PASSED_ON = ("mail_type", "mail_user", "exclusive", "wckey", "mem_per_cpu", "mem_per_gpu")
# These parameters are used to compute the numbers of tasks, GPUs and CPUs.
_COUNTS = ("ntasks_per_node", "cpus_per_task", "cpus_per_gpu", "gpus_per_task", "gres")

# The name of an sbatch option -> the name in hpcenv.
_SBATCH_NAMES = {
    **{option.sbatch.replace("-", "_"): option.name for option in OPTIONS if option.sbatch},
    **{name: name for name in ("job_name", "gpus_per_node", *_SAME_NAMES, *_PASSED_ON, *_COUNTS) if name != "setup"},
}

SUBMITIT = frozenset(
    {*_REFUSED, *_OTHER_NAMES, *_SAME_NAMES, *_PASSED_ON, *_COUNTS}
    | {"additional_parameters", "srun_args", "stderr_to_stdout"}
)


@dataclass(frozen=True, kw_only=True)
class FunctionOptions:
    """The options of a run that follow from the parameters of an executor.

    Attributes:
        keywords: the keywords for `hpcenv.submit`.
        call: how the function is called. `task` means one plain process for each task, as in submitit. `rank` means
            that torchrun starts the ranks.
        name: the beginning of the runs' names; None means the name of the function.
        stderr_to_stdout: whether stdout and stderr are written to one log.
        max_parallel: how many jobs of an array run at the same time; None for no limit.
        outputs: a folder that the functions write to.
    """

    keywords: Mapping[str, Any]
    call: Literal["task", "rank"] = "task"
    name: str | None = None
    stderr_to_stdout: bool = False
    max_parallel: int | None = None
    outputs: str | None = None


class ParameterNames(set[str]):
    """The names of the parameters, for submitit's AutoExecutor.

    submitit uses the set in two ways. For a parameter with the prefix `hpcenv_`, submitit tests `name in names`. This
    test is always true. For a parameter without a prefix (`partition=`), submitit iterates over the names of all
    executors, and the last executor that has the name gets the parameter. The iteration leaves out the names of
    SlurmExecutor. So the executor `slurm` gets a parameter without a prefix, as it does without hpcenv.
    """

    def __iter__(self) -> Iterator[str]:
        return (name for name in set(super().__iter__()) if name not in SUBMITIT)


def translate(parameters: Mapping[str, Any], known: frozenset[str]) -> FunctionOptions:
    """Return the options of a run that follow from the parameters of an executor.

    Args:
        parameters: names of submitit (`ntasks_per_node`) and keywords of `hpcenv.submit`; None means "not given".
        known: the keywords of `hpcenv.submit`.

    Raises:
        UsageError: there is no such parameter, hpcenv does not support its value, or two parameters contradict each
            other.
    """
    given = {name: value for name, value in parameters.items() if value is not None}
    _require_known(given, known)
    given = _with_additional(given)
    keywords = {name: given[name] for name in given if name in known}
    for name, keyword in _OTHER_NAMES.items():
        if name in given:
            _set(keywords, keyword, given[name], name)
    call = given.get("call", "task")
    if call not in ("task", "rank"):
        raise UsageError(f"call={call!r} is not a way to call a function", hint='call="task" or call="rank"')
    _count_gpus(given, keywords)
    _count_tasks(given, keywords, call)
    # In sbatch, and so in programs for submitit, a plain number means minutes or MiB.
    keywords |= {name: str(keywords[name]) for name in ("time", "mem") if isinstance(keywords.get(name), (int, float))}
    _pass_on(given, keywords, known)
    name, limit = keywords.pop("name", None), keywords.pop("max_parallel", None)
    return FunctionOptions(
        keywords=keywords,
        call=call,
        name=name,
        stderr_to_stdout=bool(given.get("stderr_to_stdout", False)),
        max_parallel=limit,
        outputs=given.get("outputs"),
    )


def _require_known(given: Mapping[str, Any], known: frozenset[str]) -> None:
    names = sorted({*known, *SUBMITIT, "call", "name", "max_parallel", "outputs"})
    for name, value in given.items():
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            raise UsageError(
                f"there is no parameter `{name}`",
                why=f"the parameters are {', '.join(names)}",
                hint=f"did you mean `{close[0]}`?" if close else None,
            )
        if name in _REFUSED and value not in (True, [], ()):
            raise UsageError(f"`{name}` is not a parameter of hpcenv.Executor", why=_REFUSED[name])


def _with_additional(given: Mapping[str, Any]) -> dict[str, Any]:
    """Add the entries of `additional_parameters` that hpcenv has a name for.

    As in submitit, these entries replace other values.
    """
    more = {str(name).replace("-", "_"): value for name, value in given.get("additional_parameters", {}).items()}
    taken = {_SBATCH_NAMES[name]: more.pop(name) for name in tuple(more) if name in _SBATCH_NAMES}
    return {**given, **taken, "additional_parameters": more}


def _set(keywords: dict[str, Any], name: str, value: object, origin: str) -> None:
    if keywords.get(name, value) != value:
        raise UsageError(f"`{origin}` and `{name}` contradict each other", why=f"{value!r} and {keywords[name]!r}")
    keywords[name] = value


def _count_gpus(given: Mapping[str, Any], keywords: dict[str, Any]) -> None:
    """Set the number of GPUs of each node, and pass other resources of `gres` on to sbatch."""
    resources = [item for item in str(given.get("gres", "")).split(",") if item]
    if others := [item for item in resources if not is_gpu_gres(item)]:
        keywords["sbatch"] = {"gres": ",".join(others), **keywords.get("sbatch", {})}
    if gpus := [item for item in resources if is_gpu_gres(item)]:
        match = re.fullmatch(r"gpu(?::([^:,]+))??(?::([0-9]+))?", ",".join(gpus))
        if match is None:
            raise UsageError(f"gres={given['gres']!r} is not understood", hint='gres="gpu:4", or `gpus` and `gpu_type`')
        _set(keywords, "gpus", ":".join(filter(None, (match[1], match[2] or "1"))), "gres")
    if "gpus_per_task" in given:
        _set(keywords, "gpus", int(given["gpus_per_task"]) * int(given.get("ntasks_per_node", 1)), "gpus_per_task")
    kind, _, count = str(keywords.get("gpus", "")).rpartition(":")
    if kind:
        _set(keywords, "gpu_type", kind, "gpus")
    if count:
        keywords["gpus"] = int(count)


def _count_tasks(given: Mapping[str, Any], keywords: dict[str, Any], call: str) -> None:
    """Set the numbers of processes and CPUs per node. submitit gives the number of CPUs for each task."""
    if "ntasks_per_node" in given:
        _set(keywords, "nproc", int(given["ntasks_per_node"]), "ntasks_per_node")
    elif "nproc" not in keywords:
        keywords["nproc"] = (keywords.get("gpus") or 1) if call == "rank" else 1
    if "cpus_per_task" in given:
        _set(keywords, "cpus", int(given["cpus_per_task"]) * keywords["nproc"], "cpus_per_task")
    if "cpus_per_gpu" in given:
        _set(keywords, "cpus", int(given["cpus_per_gpu"]) * int(keywords.get("gpus") or 1), "cpus_per_gpu")


def _pass_on(given: Mapping[str, Any], keywords: dict[str, Any], known: frozenset[str]) -> None:
    """Pass the options that have no keyword on to sbatch and srun."""
    sbatch = {
        name.replace("_", "-"): given[name]
        for name in _PASSED_ON
        if name not in known and given.get(name, False) is not False
    }
    sbatch |= {str(name).replace("_", "-"): value for name, value in given["additional_parameters"].items()}
    for name, more in (("sbatch", sbatch), ("srun", _srun_options(given.get("srun_args", ())))):
        if not more:
            continue
        if name not in known:
            raise UsageError(f"`{', '.join(more)}` cannot be passed to {name}", hint="leave it out")
        keywords[name] = {**more, **keywords.get(name, {})}


def _srun_options(words: Any) -> dict[str, Any]:
    """Return options of srun as a dictionary: {"cpu-bind": "none"} for `--cpu-bind=none`, True if there is no value."""
    options: dict[str, Any] = {}
    for word in words:
        match = re.fullmatch(r"--([a-z][a-z0-9-]*)(?:=(.*))?", word, re.DOTALL)
        if match is None:
            raise UsageError(f"srun_args: {word!r} is not understood", hint='srun_args=["--cpu-bind=none"]')
        options[match[1]] = True if match[2] is None else match[2]
    return options
