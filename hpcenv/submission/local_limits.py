"""Limits for memory and CPUs of a run without Slurm: a scope of the user's systemd, where there is one.

Runs on: LOGIN NODE, the machine of `--cluster local`. `systemd-run --user --scope` needs no administrator. What it
really limits is read in a scope of trial: systemd may accept a limit that it cannot pass on to the kernel
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
# The folder of the scope, as cgroup version 2 has it (cgroups(7)). In version 1 the files are not there.
_READ = 'cd "/sys/fs/cgroup$(sed -n s/^0:://p /proc/self/cgroup)" && grep -H . memory.max cpu.max || true'
# Without it, systemd ends the whole run when the kernel has ended one process, and the run would seem to be cancelled.
# A scope has this property since systemd 253.
_CONTINUE = "--property=OOMPolicy=continue"


@dataclass(frozen=True, kw_only=True)
class LocalScope:
    """How a run is started in its limits.

    Attributes:
        argv: words before its command; empty without limits.
        notes: what is limited, and what is not.
    """

    argv: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Limit:
    """One limit: what it limits, its words for the user, systemd's property, and the kernel's file."""

    what: str
    words: str
    property: str
    file: str


def scope_for(manifest: Manifest, environ: Mapping[str, str]) -> LocalScope:
    """Return how to start a run in its limits. A limit that cannot be set is said, and the run starts without it.

    Args:
        environ: environment of the run: systemd is found through it.
    """
    limits, absent = _limits(manifest)
    # Without a GPU and a limit, the program is started as in any shell.
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
    """Return the limits, and the names of what has no limit."""
    limits, absent = [], []
    mem, cpus = manifest.mem, manifest.cpus_per_task * manifest.nodes
    if mem and mem != "0":
        # A plain number is MiB for sbatch, and bytes for systemd; K, M, G and T are powers of 1024 for both.
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
    """Return the limits of a scope of trial, and why there is no scope, empty if there is one."""
    try:
        process.find_tool(_TOOL, needed_for="limit a run", path=environ.get("PATH"))
        return process.run([*argv, "--", "sh", "-c", _READ], env=environ, timeout=_SECONDS).stdout, ""
    except ToolMissing as error:
        return "", error.what
    except HpcenvError as error:
        return "", f"{_TOOL}: {(error.why or error.what).strip().splitlines()[-1]}"


def _without_lingering(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a note if the scope ends with the user's last login (loginctl(1), logind.conf(5))."""
    try:
        said = process.run(["loginctl", "show-user", "--property=Linger", "--value"], env=environ, timeout=_SECONDS)
    except HpcenvError:
        return ()
    if said.stdout.strip() != "no":
        return ()
    return ("systemd ends this run when you log out everywhere; `loginctl enable-linger` lets it go on",)
