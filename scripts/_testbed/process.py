"""The one module that starts other programs: argument lists, time limits, a cleaned environment, errors with stderr.

Every child carries the instance's mark in its environment. `down` finds by it what a killed
`up` left behind, also when no file about it exists.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import TestbedError

MARK = "_HPCENV_TESTBED_MARK"

# What the package tools of this machine need to work as its owner configured them; all else of
# the caller's environment (LD_PRELOAD, PYTHONPATH, SLURM_*, SBATCH_*) stays outside.
_KEPT_PREFIXES = ("PIP_", "SSL_", "APT_")
_KEPT_NAMES = frozenset(
    {"HOME", "TMPDIR", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "NETRC"}
    | {name for word in ("http", "https", "ftp", "no", "all") for name in (f"{word}_proxy", f"{word}_PROXY".upper())}
)
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, kw_only=True, slots=True)
class Completed:
    """How one program ended."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str


@dataclass(frozen=True, slots=True)
class Runner:
    """Runs programs for one instance."""

    mark: str
    environment: Mapping[str, str] = field(repr=False)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        timeout: float = 60,
        check: bool = True,
        extra: Mapping[str, str] | None = None,
        text: str | None = None,
    ) -> Completed:
        """Run to the end; a status other than 0 or a timeout is an error unless `check` is False."""
        words = [str(word) for word in argv]
        started = time.monotonic()
        try:
            done = subprocess.run(
                words,
                env={**self.environment, **(extra or {})},
                input=text if text is not None else "",
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
                check=False,
            )
        except FileNotFoundError as error:
            raise TestbedError(f"cannot start {words[0]}", why=str(error)) from error
        except subprocess.TimeoutExpired as error:
            waited = time.monotonic() - started
            if check:
                raise TestbedError(f"no end after {waited:.0f} s: {_short(words)}", why=_tail(error.stderr)) from error
            return Completed(argv=tuple(words), status=124, stdout="", stderr=f"no end after {waited:.0f} s")
        if check and done.returncode != 0:
            why = _tail(done.stderr) or _tail(done.stdout)
            raise TestbedError(f"status {done.returncode} from: {_short(words)}", why=why)
        return Completed(argv=tuple(words), status=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def spawn(self, argv: Sequence[str | Path], *, log: Path, extra: Mapping[str, str] | None = None) -> int:
        """Start a program that outlives this one, in its own session; answers its pid."""
        with log.open("ab") as out:
            return subprocess.Popen(
                [str(word) for word in argv],
                env={**self.environment, **(extra or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ).pid


def cleaned_environment(caller: Mapping[str, str], mark: str) -> dict[str, str]:
    """The environment of every child: the caller's package configuration, our PATH, and the mark."""
    kept = {k: v for k, v in caller.items() if k in _KEPT_NAMES or k.startswith(_KEPT_PREFIXES)}
    kept.setdefault("HOME", "/root")
    return {**kept, "PATH": SYSTEM_PATH, "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", MARK: mark}


def tied_to_us(argv: Sequence[str | Path]) -> list[str]:
    """The same program in its own mount and pid namespace, dying with us and taking all its children along.

    pdeathsig reaches `unshare` when we are killed with -9, and --kill-child hands it on to the
    namespace's first process: nothing goes on writing into a cache entry that nobody waits for.
    """
    return [
        *("setpriv", "--pdeathsig", "KILL", "--"),
        *("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private", "--"),
        *(str(word) for word in argv),
    ]


def _short(argv: Sequence[str]) -> str:
    words = " ".join(argv)
    return words if len(words) <= 200 else f"{words[:200]}..."


def _tail(output: str | bytes | None, lines: int = 12) -> str:
    if output is None:
        return ""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    return "\n".join(text.strip().splitlines()[-lines:])
