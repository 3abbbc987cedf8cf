"""Start programs in SIFs with Apptainer; read what Apptainer says.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`exec_argv` and `exec_env` are pure: together they are the one start line of every
container. What runs inside sees the image, the binds that were asked for and the
variables that were asked for - nothing of the caller's home, current directory,
environment or APPTAINER settings - and sees arguments and values literally.

SIFs are built by `adapters/squashfs.py`, and by Apptainer in `adapters/apptainer_build.py`.

Facts marked "seen" were observed with Apptainer 1.4.5 (Debian 1.4.5-2, unprivileged, user
namespaces) on 2026-11-20.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from hpcenv.adapters import process
from hpcenv.dataclass import dataclass
from hpcenv.errors import HpcenvError, ImageMismatch, ImageUnavailable, ToolFailed, UsageError

__all__ = [
    "Bind",
    "exec_argv",
    "exec_env",
    "explain",
    "find",
    "host_environment",
    "mount",
    "source_date_epoch",
    "version",
]


def _say_nothing(_line: str) -> None:
    """Take progress lines that nobody wants."""


class Bind(Protocol):
    """A directory or file of the host that the container sees."""

    @property
    def source(self) -> str:
        """Absolute path on the host."""

    @property
    def target(self) -> str:
        """Absolute path in the container."""

    @property
    def read_only(self) -> bool:
        """Whether the container may not write to it."""


def find(path: str | None = None) -> str:
    """Return the absolute path of `apptainer`.

    Raises:
        ToolMissing: it is not on PATH.
    """
    return process.find_tool("apptainer", needed_for="build and run images", path=path)


def version(apptainer: str) -> str:
    """Return Apptainer's version, for example `1.4.5`.

    Raises:
        ToolMissing, ToolFailed: it cannot be run, or says something else.
    """
    done = process.run([apptainer, "--version"], timeout=60, env=host_environment(os.environ))
    match = re.search(r"\bversion (\d+\.\d+\.\d+\S*)", done.stdout)
    if match is None:
        raise ToolFailed(
            f"`{apptainer} --version` does not name a version",
            argv=done.argv,
            status=done.status,
            why=f"it says {done.stdout[:100]!r}",
            hint="check which program this is",
        )
    return match[1]


# --- the start line ----------------------------------------------------------------------


def exec_argv(
    *,
    apptainer: str,
    image: str,
    command: Sequence[str],
    workdir: str,
    home: str | None = None,
    binds: Sequence[Bind] = (),
    gpus: bool = False,
) -> list[str]:
    """Return the argv that runs `command` in `image`.

    Not `--contain`: it hides /dev/infiniband and gives a 64 MB /tmp and a private
    /dev/shm. `--no-mount cwd` because a current directory below $HOME brings ~/.local
    with it even under `--no-home` (seen).

    Args:
        image: absolute path of a SIF, or `/proc/self/fd/N` of one that was verified; the
            caller then lets descriptor N be inherited.
        command: passed literally (`--no-eval`).
        workdir: absolute, must exist in the container; Apptainer else falls back silently
            to $HOME or /.
        home: `SRC:DEST`; None gives no home directory at all.
        binds: any path but one with a NUL, including `:`, `,`, quotes and newlines (seen).
        gpus: bind NVIDIA's driver libraries.

    Raises:
        UsageError: a value that cannot be passed literally.
    """
    argv = [apptainer, "-q", "exec", "--cleanenv", "--no-eval", "--no-mount", "cwd"]
    argv += ["--no-home"] if home is None else ["--home", _checked_home(home)]
    for bind in binds:
        argv += ["--mount", mount(bind)]
    argv += ["--pwd", _absolute("workdir", workdir)]
    if gpus:
        argv.append("--nv")
    argv += [_absolute("image", image), *_checked_command(command)]
    return argv


def mount(bind: Bind) -> str:
    """Return the value of `--mount`: one CSV record of RFC 4180, as Apptainer reads it.

    Every field with a path is quoted, so that commas, quotes and newlines are part of it.

    Raises:
        UsageError: a path that is not absolute, or holds a NUL.
    """
    fields = ["type=bind", f"source={_absolute('bind source', bind.source)}"]
    fields.append(f"destination={_absolute('bind target', bind.target)}")
    quoted = [fields[0], *('"' + text.replace('"', '""') + '"' for text in fields[1:])]
    return ",".join(quoted + (["ro"] if bind.read_only else []))


def _checked_home(home: str) -> str:
    source, colon, target = home.partition(":")
    if not colon or ":" in target:
        raise UsageError(
            f"`{home}` cannot be the container's home",
            why="the form is SRC:DEST, and Apptainer knows no way to write a `:` in either",
            hint="use a run folder without `:` in its path",
        )
    return f"{_absolute('home', source)}:{_absolute('home', target)}"


def _absolute(what: str, path: str) -> str:
    if not path.startswith("/"):
        raise UsageError(f"the {what} {path!r} is not an absolute path", hint="give the full path")
    return _literal(what, path)


def _checked_command(command: Sequence[str]) -> list[str]:
    if not command or not command[0]:
        raise UsageError("there is no command to run in the container")
    if command[0].startswith("-"):
        raise UsageError(
            f"the command {command[0]!r} begins with a dash",
            why="it would be read as an option",
            hint=f"write ./{command[0]}",
        )
    return [_literal("argument", word) for word in command]


def _literal(what: str, text: str) -> str:
    """Refuse what no argv and no environment can carry."""
    if "\0" in text:
        raise UsageError(f"the {what} {text[:200]!r} contains a NUL byte")
    return text


# What Apptainer itself may need from the host. With --cleanenv none of it reaches the
# program inside. Left out on purpose:
#   TERM, *_proxy     pass through --cleanenv (seen), so they would differ between nodes
#                     unrecorded; a setting can still set them
#   XDG_RUNTIME_DIR   only for systemd's cgroups, which exec does not use
#   LD_*              would steer the host's own helpers (squashfuse, nvidia)
_HOST_NAMES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR")
_DEFAULTS = {"PYTHONNOUSERSITE": "1", "LANG": "C.UTF-8"}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNSETTABLE = {
    "HOME": "Apptainer does not allow it; the container's home is set by its place",
    "UID": "the shell that starts the program owns it",
    "EUID": "the shell that starts the program owns it",
    "GID": "the shell that starts the program owns it",
    "PROMPT_COMMAND": "Apptainer changes its value",
}


def exec_env(inherited: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of the apptainer process.

    Inside, the program sees the image's own variables with `settings` over them, literally
    (commas, quotes, `$`, backquotes and newlines arrive; seen), and PYTHONNOUSERSITE=1 and
    LANG=C.UTF-8 unless they say otherwise. Nothing that begins with APPTAINER or
    SINGULARITY is inherited: such variables change binds, options and variables silently.

    Names with a meaning of their own (seen):
      PATH                        replaces the image's PATH
      PREPEND_PATH, APPEND_PATH   are Apptainer's words: they extend the image's PATH
      LD_LIBRARY_PATH             replaces the image's; Apptainer adds /.singularity.d/libs

    Args:
        inherited: the caller's environment.
        settings: variables for the program inside.

    Raises:
        UsageError: a name or value that would not arrive as it is.
    """
    env = host_environment(inherited)
    for name, value in {**_DEFAULTS, **settings}.items():
        _check_setting(name, value)
        env[f"APPTAINERENV_{name}"] = value
    return env


def host_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return of the caller's environment what the apptainer process itself may see."""
    return {name: inherited[name] for name in _HOST_NAMES if name in inherited}


def _check_setting(name: str, value: str) -> None:
    why = _UNSETTABLE.get(name)
    if not _NAME.fullmatch(name):
        why = "a name has letters, digits and `_`, and does not begin with a digit"
    elif name.startswith(("APPTAINER", "SINGULARITY")):
        why = "Apptainer sets and reads variables of that name itself"
    if why is not None:
        raise UsageError(f"the variable {name!r} cannot be set in a container", why=why)
    _literal(f"value of {name}", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the value of {name} is not UTF-8 text",
            why="Apptainer replaces other bytes by a question mark character",
            hint="pass it in a file",
        ) from error


# --- the time of an image --------------------------------------------------------------

_EARLIEST = 315532800  # 1980-01-01T00:00:00Z


def source_date_epoch(
    created: str | None,
    history: Sequence[str] = (),
    on_line: Callable[[str], None] = _say_nothing,
) -> int:
    """Return the SOURCE_DATE_EPOCH for an image: a time that belongs to it, not to the build.

    mksquashfs sets later file times back to it. It must not lie before the image's newest
    file, or Python finds its compiled files stale, recompiles each at every start and
    cannot write the result (seen: `import torch` takes twice as long).

    The rule: the image's `created`, rounded up to the second; if that is absent or before
    1980 (Bazel, Kaniko and Nix write 1970 or year 1), the newest usable `created` of the
    image's history; if there is none, 1980-01-01, which `on_line` is told: such images
    normally have files of 1970 or 1980, but nothing proves it here.
    """
    for times in ([created], history):
        usable = [seconds for seconds in map(_seconds, times) if seconds is not None]
        if usable:
            return max(usable)
    on_line("hpcenv: the image names no time of creation; file times after 1980-01-01 are set back to it")
    return _EARLIEST


def _seconds(moment: str | None) -> int | None:
    """Parse RFC 3339 (any number of fractional digits) to whole seconds, rounded up."""
    match = re.fullmatch(r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d+))?([Zz]|[+-]\d\d:\d\d)", moment or "")
    if match is None:
        return None
    day, clock, fraction, zone = match.groups()
    try:
        parsed = datetime.fromisoformat(f"{day}T{clock}{'+00:00' if zone in 'Zz' else zone}")
        seconds = int(parsed.timestamp()) + (1 if int(fraction or 0) else 0)
    except (ValueError, OverflowError):
        return None
    # The squashfs format counts seconds in 32 bits.
    return seconds if _EARLIEST <= seconds < 2**32 else None


# --- what went wrong ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """Text in Apptainer's output, and what it means to the user."""

    text: str
    error: type[HpcenvError]
    what: str
    hint: str


# Every failure of Apptainer's own is status 255 with `FATAL:` on stderr, so the text
# decides. Order matters: the first match wins, the cause before its consequences. Texts
# are of Apptainer 1.4.5 and of the issues of github.com/apptainer/apptainer named beside.
_SIGNS = (
    _Sign(
        text=r"no space left on device|short write: write \S*build-temp",  # 546, 1380
        error=ToolFailed,
        what="there is not enough space to convert the image",
        hint="set a temporary folder with four times the image's compressed size free "
        "(TMPDIR), and check the destination's",
    ),
    _Sign(
        text=r"disk quota exceeded",
        error=ToolFailed,
        what="your disk quota is used up",
        hint="free some space, or choose a destination and a TMPDIR on another file system",
    ),
    _Sign(
        text=r"'noexec' mount option set on",
        error=ToolFailed,
        what="the temporary folder is mounted noexec",
        hint="set TMPDIR to a folder on another file system, for example below /var/tmp",
    ),
    _Sign(
        # 2027, 2360, 2457, 3753; the second is Ubuntu's AppArmor restriction.
        text=r"create user namespace: not allowed|not allowed to create user namespace"
        r"|write info to setgroups: permission denied|user namespaces? .{0,40}disabled",
        error=ToolFailed,
        what="this machine does not let you create user namespaces",
        hint="look at `sysctl user.max_user_namespaces kernel.apparmor_restrict_unprivileged_userns`; "
        "an administrator can allow them or install apptainer-suid",
    ),
    _Sign(
        text=r"server gave http response to https client",
        error=ImageUnavailable,
        what="the registry speaks plain http",
        hint="if you trust it, add it to plain-http in hpcenv.toml",
    ),
    _Sign(
        text=r"toomanyrequests|too many requests|\b429\b",
        error=ImageUnavailable,
        what="the registry refuses more requests for now",
        hint="log in (apptainer registry login), use a mirror, or wait; limits are per address",
    ),
    _Sign(
        text=r"unauthorized|authentication required|requested access to the resource is denied"
        r"|unable to retrieve auth token",
        error=ImageUnavailable,
        what="the registry denies access to the image",
        hint="log in (apptainer registry login), and check the image's name",
    ),
    _Sign(
        text=r"manifest[_ ]unknown|name[_ ]unknown|blob[_ ]unknown",
        error=ImageUnavailable,
        what="the registry no longer has the image of that digest",
        hint="run hpcenv lock again for what the tag names today, or ask for the old image",
    ),
    _Sign(
        text=r"x509:|certificate signed by unknown|tls: failed to verify",
        error=ImageUnavailable,
        what="the registry's certificate is not trusted",
        hint="name your site's CA file in the variable SSL_CERT_FILE",
    ),
    _Sign(
        text=r"connection refused",
        error=ImageUnavailable,
        what="the registry is down",
        hint="start it, or check its port",
    ),
    _Sign(
        text=r"no such host|server misbehaving|temporary failure in name resolution",
        error=ImageUnavailable,
        what="the registry's name does not resolve",
        hint="build where there is a route to it, often the login node",
    ),
    _Sign(
        text=r"i/o timeout|deadline exceeded|connection timed out|network is unreachable"
        r"|no route to host|connection reset by peer|unexpected eof",
        error=ImageUnavailable,
        what="the conversation with the registry broke off",
        hint="try again; check a firewall or proxy in between",
    ),
    _Sign(
        text=r"architecture \(\S+\) could not run on the host",
        error=ToolFailed,
        what="the image is for another processor architecture",
        hint="choose the platform of the compute nodes, and build on one of them",
    ),
    _Sign(
        text=r"l?(?:set|list)xattr \S+: (?:permission denied|operation not supported)"
        r"|enotsup on setxattr|too many open files in system",  # 1188, 2522, 3013, 3559
        error=ToolFailed,
        what="the temporary folder's file system cannot hold an unpacked image",
        hint="set TMPDIR to a folder on a local disk, not on NFS, Lustre or GPFS",
    ),
    _Sign(
        text=r"fuse: failed to open /dev/fuse|fusermount3?: mount failed|squashfuse\S* not found"
        r"|converting sif file to temporary sandbox",  # 592, 737, 949, 1033, 2324
        error=ToolFailed,
        what="the image cannot be mounted with FUSE here",
        hint="ask for squashfuse and access to /dev/fuse on this node",
    ),
    _Sign(
        text=r"while creating container: open \S+: permission denied",
        error=ToolFailed,
        what="the SIF cannot be written where it should be",
        hint="check the folder's permissions, and that no file of another user has that name",
    ),
    _Sign(
        text=r"could not open image .*: no such file or directory",
        error=ToolFailed,
        what="the SIF is not there",
        hint="check the path on this node; the file system may not be mounted here",
    ),
    _Sign(
        text=r"bad superblock|trying to read the squashfs image",  # 952, 2121, 2458
        error=ImageMismatch,
        what="the SIF is damaged, or this node's kernel does not know its compression",
        hint="compare its size and sha256 with the lock, and copy it again",
    ),
    _Sign(
        text=r"unknown userid \d+|determine user account information",
        error=ToolFailed,
        what="this node does not know your user account",
        hint="tell your site: the node's user directory (LDAP, SSSD) does not answer",
    ),
)


def explain(said: str, *, argv: Sequence[str], status: int | None) -> HpcenvError:
    """Return the error for a failed apptainer, from what it wrote.

    Args:
        said: the end of its output.
        argv: what was run.
        status: its exit status; None when it was stopped at the time limit.
    """
    important = [line for line in said.splitlines() if re.match(r"(FATAL|ERROR|hpcenv)\b", line)]
    why = "\n".join(important or said.splitlines()[-5:])[-2000:] or "it wrote nothing"
    if status is None:
        return ToolFailed(
            "apptainer did not finish in time",
            argv=tuple(argv),
            stderr=said,
            why=why,
            hint="check the file systems and the network it uses",
        )
    for sign in _SIGNS:
        if re.search(sign.text, said, re.IGNORECASE):
            if sign.error is ToolFailed:
                return ToolFailed(sign.what, argv=tuple(argv), status=status, stderr=said, why=why, hint=sign.hint)
            return sign.error(sign.what, why=why, hint=sign.hint)
    return ToolFailed(
        f"apptainer ended with status {status}",
        argv=tuple(argv),
        status=status,
        stderr=said,
        why=why,
        hint="its whole output is above; run it by hand with --debug to see more",
    )
