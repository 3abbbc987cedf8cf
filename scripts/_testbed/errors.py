"""Exit statuses of the testbed and the one exception that carries them. Imports nothing of ours."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """One number per kind of ending; `testbed --help` prints this table."""

    OK = 0
    FAILED = 1
    USAGE = 2
    CANNOT_RUN_HERE = 3
    FAULT_UNAVAILABLE = 4
    NOT_UP = 5
    BUSY = 6
    EXEC_FAILED = 125


MEANING: dict[Status, str] = {
    Status.OK: "done; for `status`: everything is alive",
    Status.FAILED: "something failed, or `status` found a dead part",
    Status.USAGE: "wrong arguments",
    Status.CANNOT_RUN_HERE: "this machine cannot run it: no root, no Debian, a capability or tool is missing",
    Status.FAULT_UNAVAILABLE: "this kernel cannot make that fault (for example no netem for `fault slow`)",
    Status.NOT_UP: "the testbed is not up, or its target does not exist",
    Status.BUSY: "another testbed command holds the lock of this instance",
    Status.EXEC_FAILED: "`exec` itself failed; any other status of `exec` is the command's own",
}


class TestbedError(Exception):
    """What went wrong, why, and the next command to type."""

    __test__ = False  # the name starts with "Test", and pytest must not collect it

    def __init__(self, what: str, *, why: str = "", hint: str = "", status: Status = Status.FAILED) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.hint = hint
        self.status = status

    def render(self) -> str:
        """The message as the user sees it, one fact a line."""
        lines = [f"testbed: {self.what}"]
        if self.why:
            lines += [f"  why: {line}" if i == 0 else f"       {line}" for i, line in enumerate(self.why.splitlines())]
        if self.hint:
            lines.append(f"  next: {self.hint}")
        return "\n".join(lines)
