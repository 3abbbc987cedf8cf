"""`hpcenv doctor`: the properties of this cluster, each with its source.

Runs on: LOGIN NODE. Each query is separate and has a time limit. A value that cannot be found is `unknown`, with the
reason, and the other queries continue. `doctor` submits no job. To read values that only compute nodes have, use
`hpcenv verify --nodes`.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpcenv import filesystem, process
from hpcenv.cluster import node_types, slurm_command
from hpcenv.container import runtime
from hpcenv.container.apptainer import host_environment as runtime_environment
from hpcenv.errors import HpcenvError, ToolFailed
from hpcenv.project.context import Context
from hpcenv.project.store_config import StorePlace

_SECONDS = 20.0
UNKNOWN = "unknown"
# The oldest Slurm release with which hpcenv was tried (testbed, 2026-11-20).
_OLDEST = (22, 5)


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One property of the cluster.

    Attributes:
        group: the heading under which the property is printed.
        name: name of the property, in a few words.
        value: the value; `unknown` if the value could not be found.
        how: the source of the value; the reason if the value is unknown.
    """

    group: str
    name: str
    value: str
    how: str

    @property
    def known(self) -> bool:
        """Whether the value could be found."""
        return self.value != UNKNOWN


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A problem for runs on this cluster, and what to do about it.

    Attributes:
        blocking: whether the problem prevents all runs. A problem that is not blocking affects only some runs or
            features.
    """

    what: str
    why: str
    todo: str
    blocking: bool = False


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """One partition. A value that is empty or None is unknown. Times are in Slurm's format, memory is in MiB."""

    name: str
    default: bool
    state: str
    nodes: int
    cpus: str
    memory: str
    gpus: str
    max_time: str
    default_time: str = ""
    max_nodes: str = ""
    preempt_mode: str = ""
    grace_time: int | None = None


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `doctor`."""

    facts: tuple[Fact, ...]
    partitions: tuple[PartitionFacts, ...]
    troubles: tuple[Trouble, ...]
    cluster: str = ""
    gres: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    slurm: Mapping[str, str] = field(default_factory=dict)

    def value(self, name: str) -> str:
        """Return the value of a fact; `unknown` if there is no such fact."""
        return next((fact.value for fact in self.facts if fact.name == name), UNKNOWN)

    def how(self, name: str) -> str:
        """Return how a fact was found, or why it is unknown."""
        return next((fact.how for fact in self.facts if fact.name == name), "not looked at")


class _Notes:
    """The facts and problems that one part of the survey found."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.troubles: list[Trouble] = []

    def add(self, group: str, name: str, value: str, how: str) -> None:
        self.facts.append(Fact(group=group, name=name, value=_plain(value) or UNKNOWN, how=_plain(how)))

    def trouble(self, what: str, why: str, todo: str, *, blocking: bool = False) -> None:
        self.troubles.append(Trouble(what=_plain(what), why=_plain(why), todo=todo, blocking=blocking))


def _plain(text: str) -> str:
    """Return a text of another program as one line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:2000]).split())


def doctor(context: Context, *, store: StorePlace) -> Diagnosis:
    """Find the properties of this machine, and ask Slurm. No file is written.

    Args:
        store: the folder in which images are kept.
    """
    environ = context.environ
    version, how = _version(environ)
    cluster = node_types.cluster_name(environ, cache=context.cache)
    of_slurm, configured = _slurm(environ, version, how, cluster)
    of_partitions, offers, rules = _partitions(environ)
    partitions = _merge(offers, rules)
    of_accounting, accounts = _accounting(environ, there=bool(version))
    parts = (
        *(of_slurm, of_partitions, of_accounting, _gpus(configured, offers), _preemption(configured, partitions)),
        *(_containers(environ), _places(context, store), _python(environ)),
    )
    troubles = [trouble for part in parts for trouble in part.troubles]
    return Diagnosis(
        facts=tuple(fact for part in parts for fact in part.facts),
        partitions=partitions,
        troubles=tuple(sorted(troubles, key=lambda trouble: not trouble.blocking)),
        cluster=_plain(cluster.value),
        gres=tuple(filter(None, configured.get("grestypes", "").split(","))),
        accounts=accounts,
        slurm=configured,
    )


# -- Slurm --------------------------------------------------------------------------------

# For each property: its name, its key in `scontrol show config`, and the value that an unset key means.
_CONFIGURED = (
    ("selection", "SelectType", ""),
    ("process tracking", "ProctrackType", ""),
    ("task plugin", "TaskPlugin", "none"),
    ("kill on bad exit", "KillOnBadExit", ""),
    ("wait before kill", "KillWait", ""),
    ("requeue", "JobRequeue", ""),
    ("preemption", "PreemptType", "none"),
    ("preempt mode", "PreemptMode", ""),
    ("partition limits enforced", "EnforcePartLimits", "NO"),
    ("largest array", "MaxArraySize", ""),
    ("GRES", "GresTypes", "none"),
    ("accounting storage", "AccountingStorageType", "none"),
    ("stored with each job", "AccountingStoreFlags", "none"),
    ("job submit plugins", "JobSubmitPlugins", "none"),
)


def _slurm(
    environ: Mapping[str, str], version: str, how: str, name: node_types.SourcedValue
) -> tuple[_Notes, dict[str, str]]:
    """Return facts about Slurm's version and configuration, and the configuration itself (empty if unknown)."""
    notes = _Notes()
    notes.add("Slurm", "version", version, how)
    number = tuple(int(part) for part in re.findall(r"[0-9]+", version)[:2])
    if version and number < _OLDEST:
        notes.trouble(f"hpcenv was never tried with a Slurm as old as {version}", how, "ask for 22.05 or later")
    if not version:
        notes.trouble(
            "there is no Slurm here", how, "load the module that provides sbatch, or use --cluster local", blocking=True
        )
    notes.add("Slurm", "cluster", name.value, name.how)
    try:
        found = node_types.configuration(environ, seconds=_SECONDS)
    except HpcenvError as error:
        for what, _, _ in _CONFIGURED:
            notes.add("Slurm", what, "", _reason(error))
        if version:
            why = _reason(error)
            remedy = error.hint or "`scontrol ping` shows whether it is up"
            notes.trouble("Slurm does not report its configuration", why, remedy)
        return notes, {}
    for what, key, unset in _CONFIGURED:
        if key.lower() in found:
            notes.add("Slurm", what, found[key.lower()] or unset, f"scontrol show config: {key}")
        else:
            notes.add("Slurm", what, "", f"`scontrol show config` has no {key}")
    for what, value, where in (_user_signal(found), _children(found), _credentials(found)):
        notes.add("Slurm", what, value, where)
    if found.get("enforcepartlimits", "").upper() in ("", "NO"):
        notes.trouble(
            "Slurm queues jobs that can never start",
            "EnforcePartLimits is NO",
            "nothing: `hpcenv submit` checks whether the partition can start the job; sbatch does not",
        )
    return notes, found


def _version(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the version of Slurm's commands on this machine, and how it was found.

    If unknown, return "" and the reason.
    """
    try:
        tool = process.find_tool("sbatch", needed_for="submit jobs", path=environ.get("PATH"))
        said = process.run([tool, "--version"], timeout=_SECONDS, env=slurm_command.clean_environment(environ)).stdout
    except HpcenvError as error:
        return "", _reason(error)
    match = re.search(r"\bslurm\S* ([0-9][\w.-]*)", said, re.IGNORECASE)
    return (match[1], "sbatch --version") if match else ("", f"`sbatch --version` says {said[:80]!r}")


# Settings that can contain the switch for the signal before preemption, from slurm.conf(5) of 24.11 and 26.05. The
# second setting is for Slurm 22.05, which has no PreemptParameters (testbed, 2026-11-20).
_SIGNAL_SWITCHES = (
    ("PreemptParameters", "send_user_signal"),
    ("SlurmctldParameters", "preempt_send_user_signal"),
)


def _user_signal(found: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the fact whether a preempted job gets its --signal."""
    for key, word in _SIGNAL_SWITCHES:
        if word in found.get(key.lower(), "").split(","):
            return "signal before preemption", "yes", f"scontrol show config: {key} has {word}"
    keys = " nor ".join(key for key, _ in _SIGNAL_SWITCHES)
    return "signal before preemption", "no", f"scontrol show config: it is neither in {keys}"


def _children(found: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the fact whether batch signals also reach the batch script's children (cgroup.conf and slurm.conf(5))."""
    value = found.get("signalchildrenprocesses", "")
    if value:
        yes = value.lower() in ("yes", "1", "true")
        return "signals to children", "yes" if yes else "no", "scontrol show config: SignalChildrenProcesses"
    return "signals to children", "", "scontrol show config has no SignalChildrenProcesses (cgroup.conf)"


def _credentials(found: Mapping[str, str]) -> tuple[str, str, str]:
    """Return the fact how long a requeued job waits: until its old credential expires (slurm.conf(5), cred_expire)."""
    match = re.search(r"\bcred_expire=([0-9]{1,6})", found.get("authinfo", ""))
    if match:
        return "credential lifetime", f"{match[1]} s", "scontrol show config: AuthInfo has cred_expire"
    return "credential lifetime", "120 s", "Slurm's default; AuthInfo sets no cred_expire"


def _partitions(
    environ: Mapping[str, str],
) -> tuple[_Notes, tuple[node_types.Offer, ...], dict[str, dict[str, str]]]:
    """Ask Slurm for partitions, their nodes and their rules."""
    notes = _Notes()
    offers: tuple[node_types.Offer, ...] = ()
    rules: dict[str, dict[str, str]] = {}
    try:
        offers = node_types.offers(environ, seconds=_SECONDS)
        rules = node_types.partition_rules(environ, seconds=_SECONDS)
    except HpcenvError as error:
        notes.add("Slurm", "partitions", "", _reason(error))
    else:
        names = ", ".join(dict.fromkeys(offer.partition for offer in offers))
        notes.add("Slurm", "partitions", names, "sinfo --all" if names else "sinfo lists none")
    unusable = [offer for offer in offers if not offer.usable]
    down: dict[str, str] = {}
    for offer in unusable:
        down[offer.hosts] = offer.state
    if down:
        some = "; ".join(f"{hosts} {state}" for hosts, state in list(down.items())[:5])
        notes.trouble(f"nodes are out of use: {some}", "sinfo", "nothing: jobs get other nodes, or wait")
    return notes, offers, rules


def _merge(offers: tuple[node_types.Offer, ...], rules: Mapping[str, Mapping[str, str]]) -> tuple[PartitionFacts, ...]:
    """Return the facts of each partition, joined from the output of sinfo and scontrol."""
    found = []
    for name in dict.fromkeys(offer.partition for offer in offers):
        own, rule = [offer for offer in offers if offer.partition == name], rules.get(name, {})
        grace = rule.get("gracetime", "")
        found.append(
            PartitionFacts(
                name=_plain(name),
                default=own[0].default,
                state=own[0].available,
                nodes=sum(offer.nodes for offer in own),
                cpus=_range([offer.cpus for offer in own]),
                memory=_range([offer.memory for offer in own]),
                gpus=", ".join(sorted({_gpus_of(offer) for offer in own})),
                max_time=_plain(rule.get("maxtime", "")) or ("UNLIMITED" if own[0].no_limit else ""),
                default_time=_plain(rule.get("defaulttime", "")),
                max_nodes=_plain(rule.get("maxnodes", "")),
                preempt_mode=_plain(rule.get("preemptmode", "")),
                grace_time=int(grace) if re.fullmatch("[0-9]{1,9}", grace) else None,
            )
        )
    return tuple(found)


def _range(values: list[int | None]) -> str:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return ""
    return str(known[0]) if min(known) == max(known) else f"{min(known)}-{max(known)}"


def _gpus_of(offer: node_types.Offer) -> str:
    return "+".join(f"{kind}:{count}" if kind else str(count) for kind, count in sorted(offer.gpus.items())) or "0"


def _accounting(environ: Mapping[str, str], *, there: bool) -> tuple[_Notes, tuple[str, ...]]:
    """Return the fact whether sacct answers, and the user's accounts. `there` says whether Slurm is installed."""
    notes = _Notes()
    argv = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw", "--starttime=now-1minutes"]
    try:
        _ask(argv, environ)
    except HpcenvError as error:
        reason = _reason(error)
        # The value is `no` only if sacct itself says that accounting is disabled. Otherwise it is unknown.
        answered = isinstance(error, ToolFailed) and error.status is not None and "disabled" in reason
        notes.add("Slurm", "accounting", "no" if answered else "", reason)
        if there:
            notes.trouble(
                "sacct does not answer",
                reason,
                "nothing: hpcenv reads how a job ended from the run's records; without a record, the end is not known",
            )
        return notes, ()
    notes.add("Slurm", "accounting", "yes", "sacct answers")
    me = filesystem.user_name(os.geteuid())
    try:
        said = _ask(
            ["sacctmgr", "--noheader", "--parsable2", "show", "associations", f"user={me}", "format=account"],
            environ,
        )
    except HpcenvError as error:
        notes.add("Slurm", "your accounts", "", _reason(error))
        return notes, ()
    accounts = tuple(dict.fromkeys(line.partition("|")[0].strip() for line in said.splitlines() if line.strip()))
    notes.add("Slurm", "your accounts", ", ".join(accounts[:20]), "sacctmgr" if accounts else "sacctmgr lists none")
    return notes, accounts


def _gpus(configured: Mapping[str, str], offers: tuple[node_types.Offer, ...]) -> _Notes:
    """Return facts about the option with which GPUs are requested, and about the GPU types."""
    notes = _Notes()
    if not configured:
        notes.add("Slurm", "GPU request", "", "the configuration is not known")
    elif "gpu" not in configured.get("grestypes", "").split(","):
        notes.add("Slurm", "GPU request", "none", "scontrol show config: GresTypes has no gpu")
    elif configured.get("selecttype") == "select/cons_tres":
        notes.add("Slurm", "GPU request", "gpus-per-node", "select/cons_tres knows it")
    else:
        notes.add("Slurm", "GPU request", "gres", "only select/cons_tres knows --gpus-per-node (sbatch(1))")
    types = sorted({kind for offer in offers for kind in offer.gpus if kind})
    if offers:
        notes.add("Slurm", "GPU types", ", ".join(types) or "none named", "sinfo: GRES of the nodes")
    return notes


def _preemption(configured: Mapping[str, str], partitions: tuple[PartitionFacts, ...]) -> _Notes:
    """Return a trouble for the partitions in which jobs get no signal, or no time, before they are preempted."""
    notes = _Notes()
    hit = [part for part in partitions if part.preempt_mode.upper() in ("REQUEUE", "CANCEL")]
    if not hit or configured.get("preempttype", "") in ("", "preempt/none"):
        return notes
    names = ", ".join(part.name for part in hit[:8])
    if _user_signal(configured)[1] == "no":
        notes.trouble(
            f"jobs in {names} can be preempted without their signal: TERM comes at once",
            "send_user_signal is not set",
            "save often; ask your site for PreemptParameters=send_user_signal",
        )
    short = [part.name for part in hit if part.grace_time == 0]
    if short:
        notes.trouble(
            f"preempted jobs in {', '.join(short[:8])} have no time to save",
            "GraceTime is 0: KILL follows TERM after KillWait",
            "save often, or ask for a GraceTime",
        )
    return notes


# -- this machine -------------------------------------------------------------------------


def _containers(environ: Mapping[str, str]) -> _Notes:
    """Return facts about this machine's container runtime and the kernel features that it needs. Nodes may differ."""
    notes, group = _Notes(), "Containers (of this machine)"
    userns, userns_how = _user_namespaces(environ)
    try:
        program = runtime.find(environ.get("PATH"))
        found = runtime.identify(program, environ)
        notes.add(group, "runtime", f"{found} at {program}", f"{program} --version")
        if found.unusable:
            notes.trouble("containers cannot start on this machine", found.unusable, "load a module of a newer version")
    except HpcenvError as error:
        notes.add(group, "runtime", "", _reason(error))
        notes.trouble("nothing here starts containers", _reason(error), 'load its module, or use image = "host"')
        program = ""
    setuid = ""
    if program:
        setuid, how = _setuid(program, environ)
        notes.add(group, "runtime starts", setuid, how)
    notes.add(group, "user namespaces", userns, userns_how)
    if program and userns == "no" and setuid == "through user namespaces":
        notes.trouble(
            "containers cannot start on this machine",
            f"{program} is not setuid, and {userns_how}",
            "ask for user namespaces, or for an installation with setuid; nodes may have them: hpcenv verify --nodes",
        )
    ranges, ranges_how = _subuid()
    notes.add(group, "subordinate ids", ranges, ranges_how)
    version, how = _cgroup()
    notes.add(group, "cgroup", version, how)
    return notes


def _setuid(program: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return how the runtime starts containers (setuid or user namespaces), from its settings and files."""
    try:
        said = process.run([program, "buildcfg"], timeout=_SECONDS, env=runtime_environment(environ)).stdout
    except HpcenvError as error:
        return "", _reason(error)
    values = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    # The settings show which runtime this is, because their names contain the name of the runtime (`buildcfg` of
    # Apptainer 1.4.5 and SingularityCE 4.5.1).
    name = "singularity" if "SINGULARITY_CONFDIR" in values else "apptainer"
    starter = os.path.join(values.get("LIBEXECDIR", ""), name, "bin", "starter-suid")
    try:
        status = os.stat(starter)
        if status.st_uid == 0 and status.st_mode & stat.S_ISUID:
            return "setuid", starter
    except OSError:
        pass
    if values.get("LIBEXECDIR"):
        return "through user namespaces", f"{program} buildcfg: there is no setuid {starter}"
    return "", f"`{program} buildcfg` does not say where it is installed"


def _user_namespaces(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return whether this user may create a user namespace. Try it with unshare; without unshare, read /proc."""
    try:
        tool = process.find_tool("unshare", needed_for="try a user namespace", path=environ.get("PATH"))
        process.run(
            [tool, "--user", "--map-root-user", "true"], timeout=_SECONDS, env={"PATH": environ.get("PATH", "")}
        )
    except ToolFailed as error:
        return "no", f"unshare --user: {_reason(error)}"
    except HpcenvError:
        try:
            most = Path("/proc/sys/user/max_user_namespaces").read_text(encoding="ascii").strip()
        except OSError as error:
            return "", f"no unshare, and /proc/sys/user/max_user_namespaces: {error.strerror}"
        return ("no" if most == "0" else ""), f"/proc/sys/user/max_user_namespaces is {most[:20]}; no unshare to try"
    return "yes", "unshare --user made one"


def _subuid() -> tuple[str, str]:
    """Return how many subordinate user ids this user has in /etc/subuid (subuid(5))."""
    me = {filesystem.user_name(os.geteuid()), str(os.geteuid())}
    try:
        lines = Path("/etc/subuid").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        return "", f"/etc/subuid: {error.strerror}"
    counts = [line.split(":") for line in lines if line.partition(":")[0] in me]
    total = sum(int(words[2]) for words in counts if len(words) == 3 and words[2].isdigit())
    return (str(total), "/etc/subuid") if total else ("none", "/etc/subuid names no range of this user")


def _cgroup() -> tuple[str, str]:
    if os.path.exists("/sys/fs/cgroup/cgroup.controllers"):
        return "v2", "/sys/fs/cgroup/cgroup.controllers is there"
    if os.path.isdir("/sys/fs/cgroup/memory") or os.path.isdir("/sys/fs/cgroup/freezer"):
        return "v1", "/sys/fs/cgroup has a folder for each controller"
    return "", "/sys/fs/cgroup is neither cgroup v1 nor v2"


def _places(context: Context, store: StorePlace) -> _Notes:
    """Return facts about which folders compute nodes can see."""
    notes = _Notes()
    home = Path(context.environ.get("HOME") or os.path.expanduser("~"))
    places = {"home": home, "this folder": context.cwd, "image store": store.root, "hpcenv's Python": Path(sys.prefix)}
    for what, place in places.items():
        seen = filesystem.visibility(place, home=home)
        shared = f"taken as shared: {place}" if seen.assumed else f"shared: {place}"
        value = {True: shared, False: f"not shared: {place}", None: ""}[seen.shared]
        why = seen.reason if value else f"{place}: {seen.reason}"
        if what == "image store":
            why = f"{why}; {store.origin}"
        notes.add("Files that nodes must see", what, value, why)
        if seen.shared is False:
            notes.trouble(
                f"compute nodes cannot see {what} `{place}`",
                seen.reason,
                _TO_DO[what],
                blocking=what == "hpcenv's Python",
            )
    return notes


_TO_DO = {
    "home": "work in a folder that nodes share, and keep projects there",
    "this folder": "work in a folder that nodes share",
    "image store": "HPCENV_STORE=DIR on a shared file system, or `store` under [paths] in hpcenv.toml",
    "hpcenv's Python": "install hpcenv's virtual environment on a file system that all nodes share",
}


def _python(environ: Mapping[str, str]) -> _Notes:
    notes, group = _Notes(), "This hpcenv"
    notes.add(group, "Python", f"{sys.version.split()[0]} at {sys.executable}", "this process")
    loader = next((name for name in ("LMOD_CMD", "MODULESHOME") if environ.get(name)), None)
    modules = {"LMOD_CMD": "Lmod", "MODULESHOME": "Environment Modules"}.get(loader or "", "none")
    notes.add(group, "modules", modules, f"{loader} is set" if loader else "neither LMOD_CMD nor MODULESHOME is set")
    return notes


def _ask(argv: list[str], environ: Mapping[str, str]) -> str:
    tool = process.find_tool(argv[0], needed_for="ask Slurm", path=environ.get("PATH"))
    return slurm_command.run([tool, *argv[1:]], slurm_command.clean_environment(environ), timeout=_SECONDS).stdout


def _reason(error: HpcenvError) -> str:
    said = error.stderr.strip().splitlines() if isinstance(error, ToolFailed) else []
    return f"{error.what}: {said[-1]}" if said else error.what
