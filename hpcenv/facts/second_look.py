"""A second check of a host environment, when the run ends.

Runs on: COMPUTE NODE. The check step hashes every file before the training. The size and the times of a file show
whether it changed during the training. Only changed files are read again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv.container.probe_source import probe_source
from hpcenv.errors import HpcenvError
from hpcenv.facts.probe import read_look, run_probe
from hpcenv.records.facts import Facts, Look
from hpcenv.records.manifest import Manifest

# The second check takes one or two seconds. If less than this time is left until the end of the job, the check is left
# out.
SECONDS_NEEDED = 90.0
_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class SecondLook:
    """The result of a second check.

    Attributes:
        changed: at most 20 files that changed, then the number of further files.
        skipped: why there was no second check; empty if there was a second check, or if the run needs no second check.
    """

    changed: tuple[str, ...] = ()
    skipped: str = ""


def look_again(manifest: Manifest, facts: Facts | None, environ: Mapping[str, str], *, asked: bool) -> SecondLook:
    """Check the environment of this node again.

    Args:
        manifest: the run.
        facts: what the check step of this attempt found on this node.
        environ: the environment variables of the step.
        asked: whether the job was asked to end. If so, there is no time for a second check.
    """
    if manifest.environment.kind != "host" or manifest.probe_level == "record":
        return SecondLook()
    if asked:
        return SecondLook(skipped="the job was asked to end")
    if _is_near(environ.get("SLURM_JOB_END_TIME", "")):
        return SecondLook(skipped="the time limit is near")
    if facts is None or facts.look is None:
        return SecondLook(skipped="the check step left no record of the files")
    try:
        answer = run_probe(
            manifest.environment,
            environ,
            probe=probe_source(),
            level=manifest.probe_level,
            seconds=_SECONDS,
            variables={setting.name: setting.value for setting in manifest.settings},
            passed=manifest.pass_env,
            since=facts.look.newest,
        )
        found = read_look(answer)
        if found is None:
            raise ValueError("the second check gave no list of files to compare with the list of the first check")
        if found.digest == facts.look.digest:
            return SecondLook()
        return SecondLook(changed=_named(answer["look"], facts.look, found.files - facts.look.files))
    except (HpcenvError, OSError, ValueError, TypeError, KeyError) as error:
        return SecondLook(skipped=str(error.what if isinstance(error, HpcenvError) else error))


def in_words(look: SecondLook, node: str) -> tuple[str, ...]:
    """Return lines for the log. If the check was skipped, only the report says so, not the log."""
    if look.changed:
        return (f"hpcenv: node {node}: the environment changed while it ran: {', '.join(look.changed)}",)
    return ()


def _named(look: Mapping[str, object], first: Look, added: int) -> tuple[str, ...]:
    """Return the changed files, or how many files are missing. A file whose content is unchanged is not named.

    A file that could not be opened at both checks does not count as changed.
    """
    names, count = look.get("changed"), look.get("count")
    told = [str(name) for name in names] if isinstance(names, list) else []
    more = count - len(told) if isinstance(count, int) else 0
    listed = [name for name in told if name not in first.not_opened]
    if not listed and added < 0:
        listed = [f"{-added} files are gone"]
    return (*listed, *([f"and {more} more"] if more > 0 else []))


def _is_near(end: str) -> bool:
    """Return whether Slurm will end the job soon (from SLURM_JOB_END_TIME, Slurm 22.05 and newer)."""
    return end.isdecimal() and int(end) - time.time() < SECONDS_NEEDED
