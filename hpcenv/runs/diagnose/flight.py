"""Read flight-recorder dumps of torch: they show which rank did not reach a collective operation. Runs on: LOGIN NODE.

A dump is a pickle (torch 2.13, FlightRecorder.hpp). Another user may have made the dump, so only plain data are read
from it. A dump that contains a class or a function is refused.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hpcenv.records.files import read_file
from hpcenv.records.run_folder import RunFolder
from hpcenv.text import listed

_MOST_GROUPS = 8
_SHOWN = 16
_NAME = re.compile(r"rank_?(\d{1,6})\Z")


@dataclass(frozen=True, kw_only=True)
class _Last:
    """The last operation of a rank in a process group."""

    rank: int
    number: int
    name: str


def is_dump(path: Path) -> bool:
    """Return whether a file is a flight-recorder dump, by its name and its first byte."""
    if not _NAME.search(path.name):
        return False
    try:
        with open(path, "rb") as file:
            return file.read(1) == b"\x80"
    except OSError:
        return False


def dumps_of(folder: RunFolder) -> list[Path]:
    """Return the dumps of the last attempt that has dumps."""
    paths = sorted(folder.flight.glob("*/rank_*"))
    attempts = {path.parent.name for path in paths if path.parent.name.isdecimal()}
    last = max(attempts, key=int, default="")
    return [path for path in paths if path.parent.name == last and is_dump(path)]


def describe(dumps: Sequence[Path]) -> Iterator[str]:
    """Yield a line for each process group of a job whose ranks are at different operations, according to the dumps."""
    groups: dict[str, list[_Last]] = {}
    for path in dumps:
        match = _NAME.search(path.name)
        assert match is not None
        try:
            data = _PlainData(io.BytesIO(read_file(path))).load()
            lasts = _last_operations(data, int(match[1]))
        except Exception as error:  # noqa: BLE001  (a damaged pickle may raise anything)
            yield f"flight recorder: {path.name} cannot be read: {type(error).__name__}"
            continue
        for group, last in lasts.items():
            groups.setdefault(group, []).append(last)
    for group, lasts_of_group in list(groups.items())[:_MOST_GROUPS]:
        yield from _compare(group, lasts_of_group)


class _PlainData(pickle.Unpickler):
    """Reads a pickle of plain data, and loads no class and no function."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        """Refuse anything that is not plain data."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _last_operations(data: Any, rank: int) -> dict[str, _Last]:
    lasts: dict[str, _Last] = {}
    for entry in data["entries"]:
        if entry.get("is_p2p"):
            continue
        name, description = entry["process_group"]
        group = str(description or name)
        number = int(entry["collective_seq_id"])
        if group not in lasts or number > lasts[group].number:
            lasts[group] = _Last(rank=rank, number=number, name=str(entry["profiling_name"]))
    return lasts


def _compare(group: str, lasts: Sequence[_Last]) -> Iterator[str]:
    furthest = max(last.number for last in lasts)
    ahead = [last for last in lasts if last.number == furthest]
    behind = sorted((last for last in lasts if last.number < furthest), key=lambda last: (last.number, last.rank))
    names = sorted({last.name for last in ahead})
    if behind:
        first = behind[0]
        late = [last for last in behind if last.number == first.number]
        yield (
            f"flight recorder, group {group}: {_ranks(late)} stopped after operation {first.number} ({first.name}); "
            f"{_ranks(ahead)} went on to operation {furthest} ({', '.join(names)})"
        )
    elif len(names) > 1:
        calls = "; ".join(f"{_ranks([one for one in ahead if one.name == name])} called {name}" for name in names[:4])
        yield f"flight recorder, group {group}: ranks differ in operation {furthest}: {calls}"


def _ranks(lasts: Sequence[_Last]) -> str:
    numbers = sorted(last.rank for last in lasts)
    shown = listed([str(number) for number in numbers], _SHOWN)
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"
