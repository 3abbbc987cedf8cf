"""Ask Slurm for the name of a cluster, its configuration, its partitions and its nodes.

Runs on: LOGIN NODE. Queries about jobs are in `slurm`.

This module reads the text that Slurm's commands print, not their `--json`. The text is the same in Slurm 22.05, 24.11
and 26.05 (recorded in tests/fakes/outputs), but the JSON changes with every release. A value that cannot be
parsed is None; no value is guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv import process
from hpcenv.cluster import slurm_command
from hpcenv.errors import HpcenvError, ToolFailed
from hpcenv.project.duration import time_minutes
from hpcenv.records.files import write_text

# A check before submission does not wait longer for a busy slurmctld. The result of the check is then unknown.
QUICK_SECONDS = 5.0
# For a cluster of 10 000 nodes, the answer has some 100 KB.
_LONGEST = 16 * 1024 * 1024
# Paths of slurm.conf: the path in slurm.conf(5), FILES AND DIRECTORIES; Debian's path; and the copy that a configless
# slurmd or sackd makes.
_CONF_PLACES = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")
_CLUSTER_LINE = re.compile(r"^[ \t]*ClusterName[ \t]*=[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)


# -- its name -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SourcedValue:
    """A value, and its source in `how`. If the value is unknown, `value` is empty, and `how` says why."""

    value: str
    how: str


def cluster_name(environ: Mapping[str, str], *, cache: Path | None = None) -> SourcedValue:
    """Return the cluster's name, from a file if possible.

    Args:
        cache: folder in which the answer of scontrol is stored for a day. With None, nothing is stored.
    """
    named = environ.get("SLURM_CLUSTERS", "")
    if re.fullmatch(r"[\w.-]+", named) and named != "all":
        return SourcedValue(value=named.lower(), how="SLURM_CLUSTERS")
    for place in dict.fromkeys(filter(None, (environ.get("SLURM_CONF"), *_CONF_PLACES))):
        try:
            with open(place, encoding="utf-8", errors="replace") as file:
                found = _CLUSTER_LINE.search(file.read(_LONGEST))
        except OSError:
            continue
        if found is not None:
            return SourcedValue(value=found[1].strip("\"'").lower(), how=str(place))
    return _asked_name(environ, cache)


def _asked_name(environ: Mapping[str, str], cache: Path | None) -> SourcedValue:
    """Ask scontrol for the name, once a day. Login nodes of configless clusters have no slurm.conf to read."""
    where = f"{environ.get('SLURM_CONF', '')}\0{environ.get('SLURM_CONF_SERVER', '')}\0{environ.get('PATH', '')}"
    record = None if cache is None else cache / "cluster" / hashlib.sha256(os.fsencode(where)).hexdigest()[:16]
    try:
        if record is not None and time.time() - record.stat().st_mtime < 86400:
            kept = record.read_text(encoding="utf-8")
            if re.fullmatch(r"[\w.-]{1,100}", kept):
                return SourcedValue(value=kept, how="scontrol show config, asked within the last day")
    except (OSError, UnicodeDecodeError):
        pass
    try:
        name = configuration(environ, seconds=QUICK_SECONDS).get("clustername", "").lower()
    except HpcenvError as error:
        return SourcedValue(value="", how=error.what)
    if not name:
        return SourcedValue(value="", how="`scontrol show config` names no ClusterName")
    if record is not None:
        with contextlib.suppress(OSError):
            write_text(name, record)
    return SourcedValue(value=name, how="scontrol show config")


# -- its configuration --------------------------------------------------------------------


def configuration(environ: Mapping[str, str], *, seconds: float) -> dict[str, str]:
    """Return the output of `scontrol show config`: key in lower case -> value as Slurm prints it.

    Raises:
        ToolMissing, ToolFailed: scontrol is missing, or slurmctld does not answer.
    """
    return parse_configuration(_ask(["scontrol", "show", "config"], environ, seconds))


def parse_configuration(text: str) -> dict[str, str]:
    """Parse lines of `Key = value`. A value that is not set (`(null)` or `N/A`) becomes an empty string."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z_0-9\[\]]+\s*", key):
            text_value = value.strip()
            found.setdefault(key.strip().lower(), "" if text_value in ("(null)", "N/A") else text_value)
    return found


def partition_rules(environ: Mapping[str, str], *, seconds: float) -> dict[str, dict[str, str]]:
    """Return the output of `scontrol show partition`: name of a partition -> key in lower case -> value.

    Raises:
        ToolMissing, ToolFailed: scontrol is missing, or slurmctld does not answer.
    """
    return parse_partition_rules(_ask(["scontrol", "--all", "--oneliner", "show", "partition"], environ, seconds))


def parse_partition_rules(text: str) -> dict[str, dict[str, str]]:
    """Parse lines with one partition each: `PartitionName=NAME Key=value ...`."""
    found: dict[str, dict[str, str]] = {}
    for line in text.splitlines():
        pairs = dict(re.findall(r"(\S+?)=(\S*)", line))
        name = pairs.get("PartitionName")
        if name:
            found[name] = {key.lower(): value for key, value in pairs.items()}
    return found


# -- its nodes ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Offer:
    """Equal nodes of one partition. A value that could not be read is None.

    Attributes:
        default: whether jobs without `--partition` run in this partition.
        available: state of the partition: `up`, `down`, `drain` or `inact`.
        max_minutes: the longest time limit that a job may have.
        no_limit: whether the partition has no maximum for the time limit.
        max_nodes: the largest number of nodes that one job may have; None for any number.
        state: state of the nodes, as sinfo prints it for %T, for example `idle`, `mixed` or `drained*`.
        cpus, memory: CPUs and memory of a node; memory in MiB.
        cpus_per_core: how many of Slurm's CPUs are hardware threads of one core.
        gpus: type of GPU -> number of GPUs. The type is empty if GRES has no type.
        features: values for --constraint.
        hosts: Slurm's host list expression.
    """

    partition: str
    default: bool
    available: str
    max_minutes: float | None
    no_limit: bool
    min_nodes: int
    max_nodes: int | None
    nodes: int
    state: str
    cpus: int | None
    memory: int | None
    gpus: Mapping[str, int] = field(default_factory=dict)
    features: frozenset[str] = frozenset()
    hosts: str = ""
    cpus_per_core: int | None = None

    @property
    def usable(self) -> bool:
        """Whether these nodes can take new jobs, either now or when their present jobs have ended."""
        # A final `*` means that the node does not answer.
        return not self.state.endswith("*") and self.state.rstrip("~#!%$@^-+&").lower() not in _UNUSABLE


# sinfo(1), NODE STATE CODES, Slurm 22.05 to 26.05. The states of maintenance and reservations are not in this set,
# because they end without an administrator.
_UNUSABLE = frozenset(
    {"down", "drained", "draining", "fail", "failing", "error", "unknown", "inval", "future", "perfctrs", "no_respond"}
)  # fmt: skip

_SINFO = "%P|%a|%l|%s|%D|%T|%c|%m|%G|%f|%N|%z"


def offers(environ: Mapping[str, str], *, seconds: float = QUICK_SECONDS) -> tuple[Offer, ...]:
    """Ask sinfo, in one call, for all partitions (hidden partitions too) and their nodes.

    Raises:
        ToolMissing, ToolFailed: sinfo is missing or did not answer in time.
    """
    argv = ["sinfo", "--noheader", "--all", "--exact", f"--format={_SINFO}"]
    return parse_offers(_ask(argv, environ, seconds))


def parse_offers(text: str) -> tuple[Offer, ...]:
    """Parse the lines that sinfo printed in the format `_SINFO`. Lines in another format are ignored."""
    found = []
    for line in text.splitlines():
        words = line.strip().split("|")
        if len(words) not in (11, 12) or not re.fullmatch(r"[0-9]{1,9}", words[4]):
            continue
        name, available, limit, size, nodes, state, cpus, memory, gres, features, hosts = (
            w.strip() for w in words[:11]
        )
        fewest, _, most = size.rpartition("-")
        found.append(
            Offer(
                partition=name.rstrip("*"),
                default=name.endswith("*"),
                available=available.lower(),
                max_minutes=time_minutes(limit),
                no_limit=limit == "infinite",
                min_nodes=_number(fewest) or 0,
                max_nodes=_number(most),
                nodes=int(nodes),
                state=state,
                cpus=_number(cpus),
                memory=_number(memory),
                gpus=parse_gpus(gres),
                features=frozenset(filter(None, features.split(","))) - {"(null)"},
                hosts=hosts,
                cpus_per_core=_cpus_per_core(_number(cpus), words[11] if len(words) > 11 else ""),
            )
        )
    return tuple(found)


def _cpus_per_core(cpus: int | None, shape: str) -> int | None:
    """Return how many of Slurm's CPUs one core has; `shape` is sockets:cores:threads (%z).

    A CPU of Slurm can be a core or a hardware thread.
    """
    match = re.fullmatch(r"([0-9]{1,6}):([0-9]{1,6}):[0-9]{1,6}", shape.strip())
    cores = int(match[1]) * int(match[2]) if match else 0
    return max(1, cpus // cores) if cpus and cores else None


def _number(text: str) -> int | None:
    """Return a number that sinfo printed; None for a text such as `16+` (some nodes have more than 16)."""
    return int(text) if re.fullmatch(r"[0-9]{1,15}", text) else None


def parse_gpus(gres: str) -> dict[str, int]:
    """Return type of GPU -> number of GPUs, from a GRES text such as `gpu:h100:8(S:0-1),nvme:1` or `gpu:4`."""
    found: dict[str, int] = {}
    for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,()\s]+):)?([0-9]{1,6})(?=[(,\s]|$)", gres):
        found[kind] = found.get(kind, 0) + int(count)
    return found


def _ask(argv: list[str], environ: Mapping[str, str], seconds: float) -> str:
    tool = process.find_tool(argv[0], needed_for="ask what the cluster has", path=environ.get("PATH"))
    text = slurm_command.run([tool, *argv[1:]], slurm_command.clean_environment(environ), timeout=seconds).stdout
    if len(text) > _LONGEST:
        raise ToolFailed(f"`{argv[0]}` printed more than {_LONGEST >> 20} MiB", argv=(argv[0],))
    return text
