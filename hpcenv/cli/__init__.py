"""The command line. Each command parses its arguments, calls one function, and prints the result.

Runs on: LOGIN NODE. Only the modules of `cli` use click, print, exit and read os.environ.
"""

from __future__ import annotations

import sys

from hpcenv.cli import _help, _streams
from hpcenv.errors import Status


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its status."""
    argv = sys.argv[1:] if arguments is None else arguments
    _streams.prepare()
    try:
        status = _run(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        _streams.discard(1, 2)
        status = Status.PIPE_CLOSED
    except _streams.OutputLost as lost:
        from hpcenv.cli import _errors  # loads click; `hpcenv --help` does not need click

        _streams.discard(1)
        status = _errors.show_lost_output(lost.reason)
    sys.exit(status)


def _run(argv: list[str]) -> int:
    if argv in (["--help"], ["-h"]):
        print(_help.page())
        return 0
    from hpcenv.cli import _command_line  # loads click; `hpcenv --help` does not need click

    return _command_line.run(argv)
