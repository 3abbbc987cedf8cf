"""`hpcenv` and `python -m hpcenv`."""

from __future__ import annotations

import atexit
import os
import signal
import sys

# Until the command line can report ^C itself, it ends the process without a traceback.
_handler = signal.signal(signal.SIGINT, signal.SIG_DFL)

from hpcenv.cli import main as _main  # noqa: E402


def _unraisable(problem: sys.UnraisableHookArgs) -> None:
    """Repeat a ^C that came where Python cannot raise it, as in a callback of an import."""
    if problem.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(problem)
        return
    import threading

    main_thread = threading.main_thread().ident or 0
    threading.Timer(0.01, signal.pthread_kill, (main_thread, signal.SIGINT)).start()


def main() -> None:
    """Run the command line and exit with its status."""
    # A parent may have ignored SIGINT (nohup, a job in the background): that stays.
    if _handler is not signal.SIG_DFL:
        signal.signal(signal.SIGINT, _handler)
    sys.unraisablehook = _unraisable
    try:
        _run()
    except SystemExit as end:
        _leave(end.code)
        raise


def _run() -> None:
    try:
        _main()
    except KeyboardInterrupt:
        sys.stderr.write("error[interrupted]: interrupted\n")
        sys.exit(130)


def _leave(status: object) -> None:
    """End the process without Python's own end, which frees every object: 30 ms of a submission (docs/decisions/0021).

    The exit functions of libraries are called, as Python's multiprocessing module does it for its processes
    (popen_fork.py, Python 3.13). It returns where only Python's own end is right: a status that is no number, another
    thread that is to be waited for, output that cannot be written.
    """
    threading = sys.modules.get("threading")
    threads = [] if threading is None else [one for one in threading.enumerate() if not one.daemon]
    if not isinstance(status, int) or len(threads) > 1:
        return
    atexit._run_exitfuncs()  # noqa: SLF001
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:  # noqa: BLE001  (Python's own end reports it once more)
        return
    os._exit(status & 0xFF)


if __name__ == "__main__":
    main()
