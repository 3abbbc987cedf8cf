"""Turn a determinism profile into options of the start hook and environment variables for one run.

Runs on: LOGIN NODE. The table of switches is incontainer/start_hook/switches.py.
"""

from __future__ import annotations

import re
from typing import Literal

from hpcenv.errors import UsageError
from hpcenv.incontainer.start_hook.switches import SWITCHES, variables_of
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.option_values import first_and_last
from hpcenv.project.spec import Project
from hpcenv.records.manifest import WITHOUT_RANKS, DeterminismOptions, Launcher, RecordingOptions, Setting
from hpcenv.submission.request import SubmitOptions


def determinism_options(
    options: SubmitOptions,
    project: Project,
    locked: Lockfile,
    *,
    gpus: int,
    backend: str,
    launcher: Launcher | Literal["tasks"],
) -> DeterminismOptions:
    """Return the determinism profile of a run, its base seed and its variables. Pure.

    Args:
        options: the merged options. `determinism` and `seed` have precedence over hpcenv.toml and the lockfile.
        gpus: the number of GPUs on each node.
        backend: the backend of torch.distributed.
        launcher: the program that starts the ranks.

    Raises:
        UsageError: the program starts the ranks itself, so hpcenv cannot seed the ranks and cannot set their switches.
    """
    profile = options.determinism or locked.determinism.profile
    seed = project.determinism.seed if options.seed is None else options.seed
    seeds = profile == "off" and (options.seed is not None or "seed" in project.determinism.model_fields_set)
    if launcher in WITHOUT_RANKS and (seeds or profile != "off"):
        raise _not_ours(options, profile, seed, seeds=seeds, launcher=launcher)
    nccl = _nccl(locked) if backend == "nccl" else None
    given = variables_of(profile, seed=seed, nccl=nccl, gpus=gpus > 0, seeds=seeds)
    return DeterminismOptions(profile=profile, seed=seed, seeds=seeds, variables=given)


def _not_ours(options: SubmitOptions, profile: str, seed: int, *, seeds: bool, launcher: str) -> UsageError:
    if seeds:
        typed, option, line = options.seed is not None, f"--seed {seed}", f"seed = {seed}"
    else:
        typed, option, line = options.determinism is not None, f"--determinism {profile}", f'profile = "{profile}"'
    asked = f"`{option}`" if typed else f"`{line}` under [determinism]"
    without = f"without {asked}" if typed or seeds else "--determinism off"
    return UsageError(
        f"`--launcher {launcher}` and {asked} contradict each other",
        why="the program starts the ranks itself, so hpcenv cannot seed them or set their switches",
        hint=f"{without}, and hpcenv.training.seed_everything({seed}) in the script; or another --launcher",
    )


def _nccl(locked: Lockfile) -> tuple[int, int] | None:
    """Return the locked version of NCCL; None if the version is not known. With None, no variable for NCCL is set."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", str(locked.facts.get("libs.nccl.version", "")))
    return None if match is None else (int(match[1]), int(match[2]))


def recording_options(options: SubmitOptions, project: Project) -> RecordingOptions:
    """Return which values the ranks of a run record. Pure."""
    every = options.hash_parameters_every
    first, last = (0, 0) if options.trace_steps is None else first_and_last(options.trace_steps)
    return RecordingOptions(
        metrics=options.record_metrics,
        hash_parameters_every=project.determinism.hash_parameters_every if every is None else every,
        stop_after_steps=options.stop_after_steps or 0,
        trace_first=first,
        trace_last=last,
    )


def variables(determinism: DeterminismOptions) -> tuple[Setting, ...]:
    """Return the variables of the profile as settings for the ranks."""
    reasons, origin = {switch.name: switch.why for switch in SWITCHES}, origin_of(determinism)
    return tuple(
        Setting(name=name, value=value, origin=origin, reason=reasons[name])
        for name, value in determinism.variables.items()
    )


def origin_of(determinism: DeterminismOptions) -> str:
    """Return the origin of the profile's variables. judge/network/lint.py searches for the first words of this text."""
    return f"base seed {determinism.seed}" if determinism.seeds else f"determinism profile {determinism.profile}"
