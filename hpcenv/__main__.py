"""The start of the command line, for `hpcenv` and `python -m hpcenv`."""

from __future__ import annotations

import signal
import sys

# Until the command line can report ^C itself, ^C ends the process without a traceback.
_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)

from hpcenv.cli import main as _main  # noqa: E402


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    """If a ^C came where Python cannot raise KeyboardInterrupt (for example, an import callback), send SIGINT again."""
    if problem.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(problem)
        return
    import threading

    main_thread = threading.main_thread().ident or 0
    threading.Timer(0.01, signal.pthread_kill, (main_thread, signal.SIGINT)).start()


def main() -> None:
    """Run the command line and exit with its status."""
    # If the parent process ignores SIGINT (nohup, a job in the background), this process also ignores SIGINT.
    if _handler is not signal.SIG_DFL:
        signal.signal(signal.SIGINT, _handler)
    sys.unraisablehook = _unraisable
    try:
        _main()
    except KeyboardInterrupt:
        sys.stderr.write("error[interrupted]: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
