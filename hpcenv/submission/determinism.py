"""What a determinism profile means for one run: the options of the start hook, and environment variables.

Runs on: LOGIN NODE. The table of switches is incontainer/start_hook/switches.py.
"""

from __future__ import annotations

import re

from hpcenv.incontainer.start_hook.switches import SWITCHES, variables_of
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.option_values import first_and_last
from hpcenv.project.spec import Project
from hpcenv.records.manifest import DeterminismOptions, RecordingOptions, Setting
from hpcenv.submission.request import SubmitOptions


def determinism_options(
    options: SubmitOptions, project: Project, locked: Lockfile, *, gpus: int, backend: str
) -> DeterminismOptions:
    """Return how strictly a run must repeat. Pure.

    Args:
        options: merged; `determinism` and `seed` win over hpcenv.toml and the lockfile.
        gpus: of each node.
        backend: of torch.distributed.
    """
    profile = options.determinism or locked.determinism.profile
    seed = project.determinism.seed if options.seed is None else options.seed
    nccl = _nccl(locked) if backend == "nccl" else None
    return DeterminismOptions(
        profile=profile, seed=seed, variables=variables_of(profile, seed=seed, nccl=nccl, gpus=gpus > 0)
    )


def _nccl(locked: Lockfile) -> tuple[int, int] | None:
    """Return the locked version of NCCL; None if it is unknown: then no variable for it is set."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})", str(locked.facts.get("libs.nccl.version", "")))
    return None if match is None else (int(match[1]), int(match[2]))


def recording_options(options: SubmitOptions, project: Project) -> RecordingOptions:
    """Return what the ranks of a run record. Pure."""
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
    """Return the variables of the profile, for the ranks."""
    reasons, origin = {switch.name: switch.why for switch in SWITCHES}, origin_of(determinism)
    return tuple(
        Setting(name=name, value=value, origin=origin, reason=reasons[name])
        for name, value in determinism.variables.items()
    )


def origin_of(determinism: DeterminismOptions) -> str:
    """Return where these variables come from; judge/network/lint.py knows the first words."""
    return f"determinism profile {determinism.profile}"
