"""Read the wheels of one package.

Runs on: LOGIN NODE, in a process that also imports pip. Standard library and pip only.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hpcenv.locking.wheels.lists import ListedWheel, WheelLists
from hpcenv.locking.wheels.names import fits, is_of_package, package_key, parse_wheel_name
from hpcenv.locking.wheels.pip_session import PipSession, Unreachable
from hpcenv.locking.wheels.proof import DIRECT, InstalledDist, SeenWheel, other_program
from hpcenv.locking.wheels.remote_wheel import read_remote
from hpcenv.locking.wheels.wheel_file import WheelReading, read_local
from hpcenv.locking.wheels.wheel_record import NotAWheel

OTHERS_READ = 12  # how many wheels are tried if none has the installed tags


def look_up(dist: InstalledDist, answer: dict[str, Any], *, lists: WheelLists, pip: PipSession, cache: Path) -> None:
    """Read wheels until one has a RECORD equal to the installed one, and add what was found to `answer`."""
    links, trouble = lists.of(package_key(dist))
    answer["trouble"] = trouble
    if dist.direct_url is not None:
        url = dist.direct_url["url"]
        filename = unquote(url.rsplit("/", 1)[-1])
        # The hash that direct_url.json states is left out. hpcenv computes the hash itself, to check this statement.
        links = [*links, ListedWheel(label=DIRECT, filename=filename, location=url, local=False)]
    exact, others = _candidates(dist, links)
    # If a wheel was renamed, the tags in its name differ from those in its WHEEL file. RECORD covers the WHEEL file. So
    # if a wheel with the exact name is listed, wheels with different names cannot match.
    chosen = exact or others[:OTHERS_READ]
    proved = False
    for link in chosen:
        if proved and link not in exact:
            break
        seen = _read_first(dist, link, pip=pip, cache=cache)
        answer["files"].append(asdict(seen) | {"exact": link in exact})
        proved = proved or (dist.record_sha256 in seen.records and not other_program(dist, seen.programs))


def _candidates(dist: InstalledDist, links: Iterable[ListedWheel]) -> tuple[list[ListedWheel], list[ListedWheel]]:
    """Return the wheels with the installed build and tags, and the other wheels of the version, the likeliest first."""
    package = package_key(dist)
    merged: dict[tuple[str, str], ListedWheel] = {}
    exact: list[ListedWheel] = []
    others: list[tuple[tuple[int, bool, str], ListedWheel]] = []
    for link in links:
        wheel = parse_wheel_name(link.filename) if is_of_package(link.filename, package) else None
        if wheel is None:
            continue
        first = merged.setdefault((link.filename, link.sha256 or link.location), link)
        if first is not link:
            first.others.append(link)
        elif fits(dist, link.filename) and dist.tags:
            exact.append(link)
        else:
            likeness = len(wheel.tags & frozenset(dist.tags)) + any(tag.endswith("-any") for tag in wheel.tags)
            others.append(((-likeness, os.uname().machine not in link.filename, link.filename), link))
    return exact, [link for _, link in sorted(others, key=lambda pair: pair[0])]


def _read_first(dist: InstalledDist, link: ListedWheel, *, pip: PipSession, cache: Path) -> SeenWheel:
    """Read one wheel, from the first location that has the wheel."""
    reasons = []
    for copy in (link, *link.others):
        try:
            if copy.local:
                with open(copy.location, "rb") as file:
                    read = read_local(file, copy.filename, pip.deadline)
            else:
                read = read_remote(copy, dist, pip=pip, cache=cache)
        except Unreachable as error:
            reasons.append(str(error))
            continue
        except OSError as error:
            reasons.append(error.strerror or type(error).__name__)
            continue
        except NotAWheel as error:
            read = WheelReading(problem=str(error))
        sha256 = read.sha256 or link.sha256
        problem = read.problem
        if read.sha256 and link.sha256 and read.sha256 != link.sha256:
            problem, sha256 = "its sha256 is not the one that the index states", link.sha256
        return SeenWheel(
            label=link.label,
            filename=link.filename,
            sha256=sha256,
            exact=False,
            records=read.records,
            programs=read.programs,
            problem=problem,
            unread=read.unread,
        )
    return SeenWheel(
        label=link.label, filename=link.filename, sha256=link.sha256, exact=False, unread="; ".join(reasons)
    )
