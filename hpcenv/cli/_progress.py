"""Show the progress of long work: as bars on a terminal, as plain lines in a log, or as JSON lines.

The progress is printed to stderr, because stdout is for results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from hpcenv.cli import _render, _streams
from hpcenv.cli._terminal import escape_control
from hpcenv.errors import Interrupted
from hpcenv.progress import Event, OnEvent

# In a log, the progress of a phase is printed at this interval in seconds, in addition to its start and end.
_EVERY_SECONDS = 10.0
# In JSON, the time between two events of one phase is at least this number of seconds.
_EVENT_SECONDS = 1.0

_WORDS = {
    "resolve": "resolving",
    "fetch": "fetching",
    "index": "reading",
    "merge": "merging",
    "pack": "packing",
    "build": "building",
    "verify": "verifying",
    "stage": "staging",
    "publish": "publishing",
}


@contextlib.contextmanager
def shown(*, as_json: bool) -> Iterator[OnEvent]:
    """Yield a function that shows events. The form of the output depends on stderr (terminal or log) and on `as_json`.

    During the block, the signals TERM and HUP have the same effect as ^C: unfinished files are removed, and leases are
    returned. scancel, a time limit or a closed terminal sends these signals.

    Raises:
        Interrupted: one of these signals arrived.
    """
    with _ended_politely():
        if as_json:
            yield _JsonLines()
        elif sys.stderr.isatty():
            with _bars() as show:
                yield show
        else:
            yield _PlainLines()


class _Ended(KeyboardInterrupt):
    """A signal asked the process to end."""


@contextlib.contextmanager
def _ended_politely() -> Iterator[None]:
    def end(number: int, _frame: object) -> None:
        raise _Ended(signal.Signals(number).name)

    mine: list[signal.Signals] = []
    if threading.current_thread() is threading.main_thread():
        # If this process already ignores a signal, the signal stays ignored. For example, nohup(1) ignores SIGHUP.
        wanted = (signal.SIGTERM, signal.SIGHUP)
        mine = [number for number in wanted if signal.getsignal(number) is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    except KeyboardInterrupt as stop:
        what = f"ended by {stop}" if isinstance(stop, _Ended) else "interrupted"
        hint = "run the same command again: it continues with the finished parts"
        raise Interrupted(what, hint=hint) from stop
    finally:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)


class _JsonLines:
    """Prints one JSON object for each note, each start and each end, and for some events between start and end."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], float] = {}

    def __call__(self, event: Event) -> None:
        key, now = (event.phase, event.what), time.monotonic()
        under_way = event.phase not in ("note", "wait") and (event.total is None or event.done < event.total)
        if under_way and now - self._last.get(key, -_EVENT_SECONDS) < _EVENT_SECONDS:
            return
        self._last[key] = now
        _render.tell(json.dumps({"event": dataclasses.asdict(event)}, sort_keys=True))


def _label(event: Event) -> str:
    what = event.what
    if what.startswith("sha256:"):
        what = f"layer {what[7:19]}" if event.phase in ("fetch", "index") else what[7:19]
    return escape_control(f"{_WORDS.get(event.phase, event.phase)} {what}")


def _amount(event: Event) -> str:
    if event.unit == "bytes":
        total = "" if event.total is None else f" of {event.total / 1e6:.0f}"
        return f"{event.done / 1e6:.0f}{total} MB"
    total = "" if event.total is None else f" of {event.total}"
    return f"{event.done}{total} {event.unit}".rstrip()


class _PlainLines:
    """Prints plain lines: the start of a phase, its progress at intervals, and its end with its duration."""

    def __init__(self) -> None:
        self._began: dict[tuple[str, str], float] = {}
        self._last: dict[tuple[str, str], float] = {}

    def __call__(self, event: Event) -> None:
        if event.phase in ("note", "wait"):
            _render.tell(escape_control(event.what))
            return
        key, now = (event.phase, event.what), time.monotonic()
        began = self._began.setdefault(key, now)
        if event.total is not None and event.done >= event.total:
            self._began.pop(key)
            self._last.pop(key, None)
            seconds = f" in {now - began:.1f} s" if now - began >= 0.1 else ""
            amount = f": {_amount(event)}" if event.unit else ""
            _render.tell(f"{_label(event)}{amount}{seconds}")
        elif key not in self._last:
            self._last[key] = now
        elif now - self._last[key] >= _EVERY_SECONDS:
            self._last[key] = now
            _render.tell(f"{_label(event)}: {_amount(event)}")


@contextlib.contextmanager
def _bars() -> Iterator[OnEvent]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column

    # If a line is too long for 80 columns, the text is shortened, but not the numbers.
    text = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    columns = (
        TextColumn("{task.description}", table_column=text, markup=False),
        BarColumn(bar_width=16),
        TextColumn("{task.fields[amount]}", table_column=Column(no_wrap=True), markup=False),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
    )
    tasks: dict[tuple[str, str], Any] = {}
    # Bars move the cursor. So this code itself escapes control characters in texts, and the stream does not.
    console = Console(file=_streams.unchanged(sys.stderr))
    with Progress(*columns, console=console, expand=True) as progress:

        def show(event: Event) -> None:
            if event.phase in ("note", "wait"):
                progress.console.print(escape_control(event.what), markup=False, highlight=False)
                return
            key = (event.phase, event.what)
            if key not in tasks:
                tasks[key] = progress.add_task(_label(event), total=event.total, amount="")
            progress.update(tasks[key], completed=event.done, total=event.total, amount=_amount(event))

        yield show
