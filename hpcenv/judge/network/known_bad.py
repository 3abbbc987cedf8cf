"""Versions that are known to fail, each with a date and a source.

Runs on: COMPUTE NODE, and LOGIN NODE for explanations. Standard library only. To add a version, add a row to KNOWN_BAD.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class BadVersion:
    """A range of versions of one component that are known to fail.

    Attributes:
        where: where the component is: on the `host`, or in the environment (`image`).
        first, before: the range. `first` is the first version that fails, `before` the first version that works
            again; empty if no later version works.
        ending: the range has only versions whose text ends with this text; empty for all versions.
        profiles: network profiles in which the versions fail; empty for all profiles.
        machine: `uname -m` of the nodes on which the versions fail; empty for all nodes.
        date: date of the source, or the day on which the source was read.
    """

    id: str
    component: str
    where: Literal["host", "image"]
    first: str
    before: str
    what: str
    hint: str
    source: str
    date: str
    profiles: tuple[str, ...] = ()
    machine: str = ""
    ending: str = ""


# Read 2026-11-23. The test of 1.18.0 by the authors of the report was stopped early, so the report does not say whether
# 1.18.0 works.
_GEODESIC = "GeodesicResearch/geodesic-megatron 39309f8, docs/investigations/slingshot-fix-results.md"

KNOWN_BAD = (
    BadVersion(
        id="ofi-1.8.1",
        component="aws-ofi-nccl",
        where="host",
        first="1.8.1",
        before="1.8.2",
        profiles=("slingshot",),
        what="deadlocks on Slingshot (seen on GH200); 14 settings were tried, and none of them prevents the deadlock",
        hint="use aws-ofi-nccl 1.17 or newer, which has the plugin's own fix",
        source=_GEODESIC,
        date="2026-11-23",
    ),
    BadVersion(
        id="ofi-tree-connect",
        component="aws-ofi-nccl",
        where="host",
        first="1.19.2",
        before="",
        profiles=("slingshot",),
        what="jobs with more than about 2,000 connections hang while trees are connected (seen with 1.19.2 and 1.20.0)",
        hint="set NCCL_MAX_NCHANNELS=20, as the authors of the report did",
        source="aws/aws-ofi-nccl#1379",
        date="2026-08-27",
    ),
    BadVersion(
        id="ofi-1.8.1-image",
        component="aws-ofi-nccl",
        where="image",
        first="1.8.1",
        before="1.8.2",
        profiles=("slingshot",),
        what="deadlocks on Slingshot (seen on GH200); 14 settings were tried, and none of them prevents the deadlock",
        hint="build aws-ofi-nccl 1.17 or newer into the image, or bind the site's aws-ofi-nccl",
        source=_GEODESIC,
        date="2026-11-23",
    ),
    BadVersion(
        id="ofi-for-efa",
        component="aws-ofi-nccl",
        where="image",
        first="0",
        before="",
        ending="-aws",
        profiles=("slingshot",),
        what="a release that was tested on EFA only; in NVIDIA's images until 2026, the loader finds it first",
        hint="put the plugin for Slingshot before it in LD_LIBRARY_PATH, or name it in NCCL_NET_PLUGIN",
        source="aws-ofi-nccl 2daf7d3, README.md; NVIDIA-NeMo/Megatron-Bridge#5033 and NVIDIA-NeMo/RL#1973",
        date="2026-08-21",
    ),
    BadVersion(
        id="nccl-2.26-net-id",
        component="nccl",
        where="image",
        first="2.26",
        before="2.27",
        what="ends with `Could not find NET with id 0` on some InfiniBand systems (seen with 2.26.2, torch 2.7)",
        hint="use a torch with NCCL 2.27 or newer (torch 2.8)",
        source="NVIDIA/nccl#1748",
        date="2025-08-06",
    ),
    BadVersion(
        id="nccl-proxy-aarch64",
        component="nccl",
        where="image",
        first="2.28",
        before="2.29.3",
        machine="aarch64",
        what="loses slots of its proxy on Grace, and long runs hang without a message (seen with 2.28.9)",
        hint="use a torch with NCCL 2.29.3 or newer",
        source="marin-community/marin#7344, NVIDIA/nccl 25368a7",
        date="2026-08-07",
    ),
)


def matches(entry: BadVersion, version: str) -> bool:
    """Return whether a version is in the range of an entry.

    A version that does not begin with a number is in no range.
    """
    number = _number(version)
    if not number or not version.endswith(entry.ending):
        return False
    return _number(entry.first) <= number and (not entry.before or number < _number(entry.before))


def _number(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found.group(0).split(".")) if found else ()
