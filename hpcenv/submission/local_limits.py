"""Limit the memory and CPUs of a run without Slurm, with a scope of the user's systemd if the machine has systemd.

Runs on: LOGIN NODE, the machine of `--cluster local`. `systemd-run --user --scope` needs no administrator. A trial
scope shows which limits are in effect, because systemd may accept a limit that it cannot pass on to the kernel
(systemd.resource-control(5)).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv import process
from hpcenv.errors import HpcenvError, ToolMissing
from hpcenv.records.manifest import Manifest
from hpcenv.text import plural

_TOOL = "systemd-run"
_SECONDS = 20.0
# This command prints the limits from the scope's folder in cgroup version 2 (cgroups(7)). Version 1 does not have these
# files.
_READ = 'cd "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)" && grep -H . memory.max cpu.max || true'
# Without this property, systemd ends the whole run after the kernel has killed one process for lack of memory. The run
# would then look like a cancelled run. Scopes have this property since systemd 253.
_CONTINUE = "--property=OOMPolicy=continue"


@dataclass(frozen=True, kw_only=True)
class LocalScope:
    """How a run is started with limits.

    Attributes:
        argv: the words before the command of the run; empty if there are no limits.
        notes: texts for the user that say which limits are in effect, and which limits are not.
    """

    argv: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """One limit: what is limited, the text for the user, the property of systemd, and the file of the kernel."""

    what: str
    words: str
    property: str
    file: str


def scope_for(manifest: Manifest, environ: Mapping[str, str]) -> LocalScope:
    """Return how to start a run with its limits. If a limit cannot be set, the run starts without it, and with a note.

    Args:
        environ: the environment of the run. systemd-run needs its variables to find the user's systemd.
    """
    limits, absent = _limits(manifest)
    # A run without GPUs and without limits gets no notes.
    notes = [f"not limited: {what}" for what in absent] if limits or manifest.gpus_per_node else []
    if not limits:
        return LocalScope(notes=tuple(notes))
    argv = [_TOOL, "--user", "--scope", "--quiet", f"--description=hpcenv {manifest.run}"]
    argv += [f"--property={limit.property}" for limit in limits]
    found, why = _try([*argv, _CONTINUE], environ)
    if why:
        found, why = _try(argv, environ)
    else:
        argv.append(_CONTINUE)
    if why:
        return LocalScope(notes=(*notes, *(f"not limited: {limit.what}: {why}" for limit in limits)))
    for limit in limits:
        value = re.search(rf"^{re.escape(limit.file)}:(\S+)", found, re.MULTILINE)
        if value is None or value[1] == "max":
            notes.append(f"not limited: {limit.what}: the user's systemd may not set {limit.file} on this machine")
        else:
            notes.append(f"limited by a scope of systemd: {limit.words}")
    return LocalScope(argv=(*argv, "--"), notes=(*notes, *_without_lingering(environ)))


def _limits(manifest: Manifest) -> tuple[list[_Limit], list[str]]:
    """Return the limits, and a text for each resource without a limit."""
    limits, absent = [], []
    mem, cpus = manifest.mem, manifest.cpus_per_task * manifest.nodes
    if mem and mem != "0":
        # A number without a unit means MiB for sbatch, and bytes for systemd. For both, K, M, G and T are powers of
        # 1024.
        size = f"{mem}M" if mem.isdigit() else mem.upper()
        limits.append(_Limit(what="memory", words=f"{size} of memory", property=f"MemoryMax={size}", file="memory.max"))
    else:
        absent.append("memory (--mem limits it)")
    if cpus:
        quota = f"CPUQuota={100 * cpus}%"
        limits.append(_Limit(what="CPUs", words=plural(cpus, "CPU"), property=quota, file="cpu.max"))
    else:
        absent.append("CPUs (--cpus limits them)")
    return limits, absent


def _try(argv: list[str], environ: Mapping[str, str]) -> tuple[str, str]:
    """Start a trial scope.

    Return two texts: the limits that are in effect in the scope, and the reason why the start failed. The second text
    is empty if the start worked.
    """
    try:
        process.find_tool(_TOOL, needed_for="limit a run", path=environ.get("PATH"))
        return process.run([*argv, "--", "sh", "-c", _READ], env=environ, timeout=_SECONDS).stdout, ""
    except ToolMissing as error:
        return "", error.what
    except HpcenvError as error:
        return "", f"{_TOOL}: {(error.why or error.what).strip().splitlines()[-1]}"


def _without_lingering(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note if the scope ends when the user has logged out everywhere (loginctl(1), logind.conf(5))."""
    try:
        said = process.run(["loginctl", "show-user", "--property=Linger", "--value"], env=environ, timeout=_SECONDS)
    except HpcenvError:
        return ()
    if said.stdout.strip() != "no":
        return ()
    return ("systemd ends this run when you log out everywhere; after `loginctl enable-linger`, the run continues",)
