"""Find out whether a partition can ever run a job: compare the request with the resources of the nodes.

Runs on: LOGIN NODE. Pure: the answer of sinfo is an argument. Nodes that are down count, too, because a request is
refused only if no node can ever fulfil it. If a value of a node is not known, the request counts as fulfilled by this
node.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpcenv.cluster.node_types import Offer
from hpcenv.errors import SubmitRejected
from hpcenv.hostlist import expand_hostlist
from hpcenv.submission.plan import Request
from hpcenv.text import listed, plural

# How many partitions or nodes an error lists.
_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class _Fault:
    """The reason why one partition cannot run the job, as the parts of an error."""

    what: str
    why: str | None
    hint: str


def judge(request: Request, origins: Mapping[str, str], offered: Sequence[Offer]) -> list[str]:
    """Return notes about the request, based on the resources of the cluster.

    Args:
        origins: name of an option -> where its value comes from.
        offered: all partitions, see `node_types.offers`.

    Raises:
        SubmitRejected: none of the requested partitions can ever run the job.
    """
    names = _partitions(request, origins, offered)
    excluded = _node_names("exclude", request.exclude, origins, offered)
    wanted = _node_names("nodelist", request.nodelist, origins, offered)
    faults = {name: _fault(request, origins, _of(offered, name), wanted, excluded) for name in names}
    first = next(iter(faults.values()), None)
    if first is None or any(fault is None for fault in faults.values()):
        return [
            note
            for name, fault in faults.items()
            for note in _why_it_may_wait(request, origins, _of(offered, name), excluded, can_run=fault is None)
        ]
    others = [
        name
        for name in dict.fromkeys(offer.partition for offer in offered if offer.available == "up")
        if name not in names and _fault(request, origins, _of(offered, name), wanted, excluded) is None
    ]
    hint = f"--partition {others[0]} has nodes for this job, if you may use it" if others else first.hint
    raise SubmitRejected(first.what, why=first.why, hint=hint)


def gpu_types(request: Request, offered: Sequence[Offer]) -> list[str]:
    """Return the GPU types that the job can get; empty if the GRES of the cluster have no types."""
    if request.gpu_type:
        return [request.gpu_type]
    return sorted({kind for offer in meant(request, offered) for kind in offer.gpus if kind})


def meant(request: Request, offered: Sequence[Offer]) -> list[Offer]:
    """Return the nodes of the partitions that the job may run in."""
    requested = set() if request.partition is None else set(request.partition.split(","))
    return [offer for offer in offered if (offer.partition in requested if requested else offer.default)]


def host_names(value: str | None) -> frozenset[str]:
    """Return the nodes that --nodelist or --exclude names; empty if only Slurm can read the value."""
    try:
        return frozenset() if value is None or "/" in value else frozenset(expand_hostlist(value))
    except (ValueError, RecursionError):
        return frozenset()


def _of(offered: Sequence[Offer], partition: str) -> list[Offer]:
    return [offer for offer in offered if offer.partition == partition]


def _partitions(request: Request, origins: Mapping[str, str], offered: Sequence[Offer]) -> list[str]:
    """Return the partitions in which the job may run: the partitions in the request, else the default partition.

    Raises:
        SubmitRejected: a requested partition does not exist, or the cluster has no default partition.
    """
    known = list(dict.fromkeys(offer.partition for offer in offered))
    names = listed([f"`{name}`" for name in known], _LISTED)
    if request.partition is None:
        default = [offer.partition for offer in offered if offer.default][:1]
        if not default and request.reservation is None:
            raise SubmitRejected(
                "no partition is named",
                why=f"this cluster has no default partition; it has {names}",
                hint=f"--partition {known[0]}, or `partition` under [submit] in hpcenv.toml",
            )
        return default
    requested = [name for name in request.partition.split(",") if name]
    missing = [name for name in requested if name not in known]
    if missing:
        near = difflib.get_close_matches(missing[0], known, n=1)
        raise SubmitRejected(
            f"there is no partition `{missing[0]}`",
            why=f"it comes from {origins.get('partition', 'nowhere')}; the cluster has {names}",
            hint=f"--partition {near[0]}" if near else "`sinfo --summarize` lists the partitions",
        )
    return requested


def _node_names(option: str, value: str | None, origins: Mapping[str, str], offered: Sequence[Offer]) -> frozenset[str]:
    """Return the nodes that an option names; empty for the path of a file, which only Slurm reads.

    Raises:
        SubmitRejected: the value is not a host list, or names a node that the cluster does not have.
    """
    if value is None or "/" in value:
        return frozenset()
    origin = origins.get(option, f"--{option}")
    try:
        names = expand_hostlist(value)
    except (ValueError, RecursionError) as error:
        raise SubmitRejected(f"`{value}` names no nodes", why=f"{error} (from {origin})", hint="n1,n[3-5]") from error
    known = _hosts(offered)
    missing = [name for name in names if name not in known]
    if missing and known:
        near = difflib.get_close_matches(missing[0], sorted(known), n=1)
        raise SubmitRejected(
            f"there is no node `{missing[0]}`",
            why=f"it comes from {origin}",
            hint=f"--{option} {near[0]}" if near else "`sinfo --Node` lists the nodes",
        )
    return frozenset(names)


def _hosts(offers: Sequence[Offer]) -> frozenset[str]:
    """Return the nodes of some offers; empty if their names cannot be parsed."""
    try:
        return frozenset(name for offer in offers for name in expand_hostlist(offer.hosts))
    except (ValueError, RecursionError):
        return frozenset()


def _fault(
    request: Request,
    origins: Mapping[str, str],
    offers: list[Offer],
    wanted: frozenset[str],
    excluded: frozenset[str],
) -> _Fault | None:
    """Return why a partition cannot run the job; None if the partition can run the job."""
    name, show = offers[0].partition, f"sinfo --partition={offers[0].partition} --Node --long"
    problem = _rules(request, origins, offers[0])
    if problem is not None:
        return problem
    if wanted and not wanted <= (hosts := _hosts(offers)) and hosts:
        outside = sorted(wanted - hosts)
        return _Fault(
            what=f"node `{outside[0]}` is not in partition `{name}`",
            why=f"it comes from {origins.get('nodelist', '--nodelist')}",
            hint=f"`{show}` lists its nodes",
        )
    needed, requested = request.nodes + request.spare, _nodes_requested(request, origins)
    left = offers
    for what, origin, fits in _conditions(request, origins):
        fitting = [offer for offer in left if fits(offer)]
        if _count(fitting, excluded) < needed:
            # Too few nodes fulfil this condition together with all conditions before it.
            before = "" if left is offers else " and everything else in the request"
            return _Fault(
                what=f"partition `{name}` has {_nodes(_count(fitting, excluded))} with {what}{before}, {requested}",
                why=f"{what} comes from {origin}; its nodes have {_shown(left)}",
                hint=f"request less, or other nodes: `{show}`",
            )
        left = fitting
    count = _count(left, excluded)
    if count < needed:
        less = f" without those of --exclude ({origins.get('exclude', '--exclude')})" if excluded else ""
        return _Fault(
            what=f"partition `{name}` has {_nodes(count)}{less}, {requested}",
            why=_nodes_origin(origins),
            hint=f"--nodes {count - request.spare}" if count > request.spare else f"`{show}` lists its nodes",
        )
    return None


def _why_it_may_wait(
    request: Request, origins: Mapping[str, str], offers: list[Offer], excluded: frozenset[str], *, can_run: bool
) -> Iterator[str]:
    """Yield the reasons why a partition runs the job only later, or only if the QOS allows the job."""
    name, needed = offers[0].partition, request.nodes + request.spare
    if offers[0].available in _TAKES_NO_JOBS:
        return
    if offers[0].available != "up":
        yield f"partition {name} is {offers[0].available}: the job will wait until it is up"
    if request.qos is not None and any(_beyond_limits(request, offers[0])):
        yield f"beyond the limits of partition {name}: the job starts only if QOS {request.qos} allows it"
    conditions = _conditions(request, origins)
    fitting = [offer for offer in offers if all(fits(offer) for _what, _origin, fits in conditions)]
    count, usable = _count(fitting, excluded), _count([offer for offer in fitting if offer.usable], excluded)
    if can_run and usable < needed:
        states = sorted({offer.state for offer in fitting if not offer.usable})
        yield (
            f"{count - usable} of the {count} fitting nodes of {name} are {' or '.join(states)} now, "
            f"{_nodes(needed)} are needed: the job will wait for them"
        )


_TAKES_NO_JOBS = ("inact", "drain", "inactive")


def _beyond_limits(request: Request, offer: Offer) -> tuple[bool, bool]:
    """Return whether the job is longer than the partition allows, and whether it has more nodes than allowed."""
    minutes, needed = request.time_minutes, request.nodes + request.spare
    too_long = minutes is not None and offer.max_minutes is not None and minutes > offer.max_minutes
    return too_long, offer.max_nodes is not None and needed > offer.max_nodes


def _rules(request: Request, origins: Mapping[str, str], offer: Offer) -> _Fault | None:
    """Compare the job with the partition's state, time limit, and smallest and largest number of nodes."""
    name, needed, requested = offer.partition, request.nodes + request.spare, _nodes_requested(request, origins)
    if offer.available in _TAKES_NO_JOBS:
        return _Fault(
            what=f"partition `{name}` takes no jobs",
            why=f"sinfo calls it `{offer.available}`; it comes from {origins.get('partition', 'the cluster')}",
            hint="`sinfo --summarize` lists the partitions",
        )
    too_long, too_many = _beyond_limits(request, offer)
    if request.qos is not None and (too_long or too_many):
        # The QOS flags PartitionTimeLimit and PartitionMaxNodes override these rules (sacctmgr(1)).
        return None
    if too_long:
        longest = _clock(offer.max_minutes or 0)
        return _Fault(
            what=f"partition `{name}` ends jobs after {longest}, {request.time} is requested",
            why=f"--time comes from {origins.get('time', '--time')}",
            hint=f"--time {longest}",
        )
    if too_many:
        return _Fault(
            what=f"partition `{name}` gives at most {_nodes(offer.max_nodes or 0)} to a job, {requested}",
            why=_nodes_origin(origins),
            hint=f"--nodes {offer.max_nodes}",
        )
    if needed < offer.min_nodes:
        return _Fault(
            what=f"partition `{name}` is for jobs of {_nodes(offer.min_nodes)} and more, {requested}",
            why=_nodes_origin(origins),
            hint=f"--nodes {offer.min_nodes}",
        )
    return None


_OfferCondition = tuple[str, str, Callable[[Offer], bool]]


def _conditions(request: Request, origins: Mapping[str, str]) -> list[_OfferCondition]:
    """Return the conditions that a node must fulfil, each with its origin, in the order of the messages."""
    found: list[_OfferCondition] = []
    gpus, kind = request.gpus_per_node, request.gpu_type
    if gpus and kind:
        what = f"{plural(gpus, 'GPU')} of type {kind}"
        found.append((what, _first(origins, "gpus", "gpu_type"), lambda offer: offer.gpus.get(kind, 0) >= gpus))
    elif gpus:
        what = plural(gpus, "GPU")
        found.append((what, _first(origins, "gpus"), lambda offer: sum(offer.gpus.values()) >= gpus))
    cpus = request.cpus_per_task
    if cpus is not None:
        what = f"{cpus} CPU{'s' * (cpus > 1)}"
        found.append((what, _first(origins, "cpus"), lambda offer: offer.cpus is None or offer.cpus >= cpus))
    memory = mebibytes(request.mem)
    if memory is not None:
        # A number without a unit means megabytes of 2**20 bytes (sbatch(1), --mem).
        unit = " MiB" if request.mem is not None and request.mem.isdecimal() else ""
        what = f"{request.mem}{unit} of memory"
        found.append((what, _first(origins, "mem"), lambda offer: offer.memory is None or offer.memory >= memory))
    ways = feature_sets(request.constraint)
    if ways:
        what = f"`{request.constraint}`"
        found.append((what, _first(origins, "constraint"), lambda offer: any(way <= offer.features for way in ways)))
    return found


def feature_sets(constraint: str | None) -> list[frozenset[str]]:
    """Return sets of features.

    A node must have all features of one set. The result is empty for expressions that only Slurm parses.
    """
    if constraint is None or not re.fullmatch(r"[\w.:-]+([&,|][\w.:-]+)*", constraint):
        return []
    if "|" in constraint and re.search("[&,]", constraint):
        return []
    if "|" in constraint:
        return [frozenset({word}) for word in constraint.split("|")]
    return [frozenset(re.split("[&,]", constraint))]


def mebibytes(mem: str | None) -> float | None:
    """Return the value of sbatch's `--mem` in MiB; None for `0` (all memory of a node) and for an unknown form.

    The value is a number with K, M, G or T; a number without a unit is in MiB (sbatch(1)).
    """
    match = re.fullmatch(r"([0-9]{1,15})([KMGT]?)B?", mem or "", re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        return None
    return int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2].upper()]


def _count(offers: Sequence[Offer], excluded: frozenset[str]) -> int:
    if not excluded:
        return sum(offer.nodes for offer in offers)
    names = _hosts(offers)
    return len(names - excluded) if names else sum(offer.nodes for offer in offers)


def _nodes(count: int) -> str:
    return f"{count or 'no'} node{'s' * (count != 1)}"


def _nodes_requested(request: Request, origins: Mapping[str, str]) -> str:
    spare = f" and {request.spare} spare ({origins.get('spare', '--spare')})" if request.spare else ""
    return f"{request.nodes}{spare} {'is' if request.nodes == 1 and not request.spare else 'are'} requested"


def _nodes_origin(origins: Mapping[str, str]) -> str | None:
    """Return the origin of the number of nodes; None if the user typed the number."""
    origin = origins.get("nodes", "hpcenv's default, 1")
    return None if origin == "--nodes" else f"--nodes comes from {origin}"


def _first(origins: Mapping[str, str], *names: str) -> str:
    return " and ".join(dict.fromkeys(origins[name] for name in names if name in origins)) or f"--{names[0]}"


def _shown(offers: Sequence[Offer]) -> str:
    """Return a text with the resources of some nodes. The text has one part for each kind of node."""
    kinds: dict[str, int] = {}
    for offer in offers:
        gpus = ", ".join(f"{count} GPUs{f' ({kind})' if kind else ''}" for kind, count in sorted(offer.gpus.items()))
        memory = "unknown memory" if offer.memory is None else f"{offer.memory} MiB"
        cpus = "?" if offer.cpus is None else offer.cpus
        kind = f"{cpus} CPUs, {memory}, {gpus or 'no GPU'}"
        kinds[kind] = kinds.get(kind, 0) + offer.nodes
    ordered = sorted(kinds, key=lambda kind: -kinds[kind])
    more = f"; {len(ordered) - 3} more kinds" if len(ordered) > 3 else ""
    return "; ".join(f"{kind} ({_nodes(kinds[kind])})" for kind in ordered[:3]) + more


def _clock(minutes: float) -> str:
    """Return minutes as Slurm writes a time limit."""
    seconds = round(minutes * 60)
    days, rest = divmod(seconds, 86400)
    text = f"{rest // 3600:02}:{rest % 3600 // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else text
