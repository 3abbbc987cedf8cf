"""Start programs in SIFs with Apptainer or SingularityCE 4; explain their errors.

Runs on: LOGIN NODE and COMPUTE NODE. Standard library only.

`exec_argv`, `env_file` and `host_environment` are pure. Together these functions make the start command of every
container. A program in the container sees the image and the requested binds and variables. Such a program does not see
the caller's home, current directory, environment, or settings for Apptainer or Singularity. Arguments and values arrive
unchanged. Only options with the same meaning in Apptainer and SingularityCE are used. docs/reference/runtimes.md lists
the differences.

SIFs are built by `image/convert/squashfs.py`, and by Apptainer in `image/convert/apptainer_build.py`.

Facts marked "seen" were observed with Apptainer 1.4.5 (Debian 1.4.5-2, unprivileged, user namespaces) on 2026-11-20.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from hpcenv.errors import Command, Hint, HpcenvError, ImageMismatch, ImageUnavailable, ToolFailed, UsageError
from hpcenv.records.manifest import Overlay

__all__ = [
    "BindMount",
    "env_file",
    "exec_argv",
    "explain",
    "host_environment",
    "mount",
    "source_date_epoch",
    "start_environment",
    "with_env_file",
    "with_own_network",
]


def _say_nothing(_line: str) -> None:
    """Ignore a progress line."""


class BindMount(Protocol):
    """A folder or file of the host that is visible in the container."""

    @property
    def source(self) -> str:
        """Absolute path on the host."""

    @property
    def target(self) -> str:
        """Absolute path in the container."""

    @property
    def read_only(self) -> bool:
        """Whether the file or folder is read-only in the container."""


# --- the start command -------------------------------------------------------------------


def exec_argv(
    *,
    apptainer: str,
    image: str,
    command: Sequence[str],
    workdir: str,
    home: str | None = None,
    binds: Sequence[BindMount] = (),
    gpus: bool = False,
    rocm: bool = False,
    no_binds: bool = False,
    overlay: Overlay | None = None,
) -> list[str]:
    """Return the argv that runs `command` in `image`.

    `--contain` is not used: it hides /dev/infiniband, limits /tmp to 64 MB and makes /dev/shm private. `--no-mount cwd`
    is used, because a current directory below $HOME makes ~/.local visible, even with `--no-home` (seen).

    Args:
        apptainer: path of apptainer.
        image: absolute path of a SIF, or `/proc/self/fd/N` of a verified SIF; the started process
            must then inherit descriptor N.
        command: argv in the container, passed literally (`--no-eval`).
        workdir: absolute path that exists in the container; otherwise Apptainer silently uses $HOME or /.
        home: `SRC:DEST`; None for no home.
        binds: paths that are bound. A path may contain all characters except NUL, also `:`, `,`, quotes and newlines
            (seen).
        gpus: whether to bind NVIDIA's driver libraries.
        rocm: whether to bind ROCm's libraries.
        no_binds: whether to leave out /tmp, too, and the folders that an administrator binds into every container
            (`bind path`).
        overlay: a squashfs that is mounted read-only at a path in the image.

    Raises:
        UsageError: a value cannot be passed literally.
    """
    left_out = "cwd,bind-paths,tmp,hostfs" if no_binds else "cwd"
    argv = [apptainer, "-q", "exec", "--cleanenv", "--no-eval", "--no-mount", left_out]
    argv += ["--no-home"] if home is None else ["--home", _checked_home(home)]
    for bind in binds:
        argv += ["--mount", mount(bind)]
    if overlay is not None:
        # The overlay must be after the binds, because a later mount covers an earlier mount.
        argv += _overlay_words(overlay)
    argv += ["--pwd", _absolute("workdir", workdir)]
    if gpus:
        argv.append("--nv")
    if rocm:
        argv.append("--rocm")
    argv += [_absolute("image", image), *_checked_command(command)]
    return argv


def mount(bind: BindMount) -> str:
    """Return the value of `--mount`: one CSV record of RFC 4180, as Apptainer reads it.

    Fields with a path are quoted, so that paths may contain commas, quotes and newlines.

    Raises:
        UsageError: a path is not absolute, or contains a NUL.
    """
    fields = ["type=bind", f"source={_absolute('bind source', bind.source)}"]
    fields.append(f"destination={_absolute('bind target', bind.target)}")
    quoted = [fields[0], *map(_quoted, fields[1:])]
    return ",".join(quoted + (["ro"] if bind.read_only else []))


def _overlay_words(overlay: Overlay) -> list[str]:
    """Return the option that mounts a squashfs read-only at its target.

    `image-src=/` mounts the root of the file system in the file (Apptainer 1.4, SingularityCE 4: "Image mounts").
    """
    source = _absolute("overlay", overlay.source)
    places = (f"source={source}", f"destination={_absolute('target of the overlay', overlay.target)}")
    return ["--mount", ",".join(("type=bind", *map(_quoted, places), "image-src=/", "ro"))]


def _quoted(field: str) -> str:
    return '"' + field.replace('"', '""') + '"'


def _checked_home(home: str) -> str:
    source, colon, target = home.partition(":")
    if not colon or ":" in target:
        raise UsageError(
            f"`{home}` cannot be the home of the container",
            why="the form is SRC:DEST, and Apptainer does not support a `:` in either path",
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
            why="Apptainer would read it as an option",
            hint=f"write {shlex.quote(f'./{command[0]}')}",
        )
    return [_literal("argument", word) for word in command]


def _literal(what: str, text: str) -> str:
    """Return `text`; refuse a NUL byte, which argv and environment cannot contain."""
    if "\0" in text:
        raise UsageError(f"the {what} {text[:200]!r} contains a NUL byte")
    return text


# Variables of the host that Apptainer itself may need. With --cleanenv, the program in the container does not get these
# variables. Some variables are left out on purpose:
#   TERM, *_proxy     pass through --cleanenv (seen), so they would differ between nodes without
#                     a record of the difference; a setting can still set them
#   XDG_RUNTIME_DIR   only for systemd's cgroups, which exec does not use
#   LD_*              would change the libraries of the host's own helpers (squashfuse, nvidia)
_HOST_NAMES = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR")
_DEFAULTS = {"PYTHONNOUSERSITE": "1", "LANG": "C.UTF-8"}

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNSETTABLE = {
    "HOME": "Apptainer does not allow it; the container's home is always the same path",
    "UID": "the shell that starts the program sets it",
    "EUID": "the shell that starts the program sets it",
    "GID": "the shell that starts the program sets it",
    "PROMPT_COMMAND": "Apptainer changes its value",
    # internal/pkg/util/env/env.go (readonlyVars) of Apptainer 1.4.5 and SingularityCE 4.5.1
    "IFS": "the container runtime does not pass it on",
    "OPTIND": "the container runtime does not pass it on",
    "PWD": "the container runtime does not pass it on; the working directory is the run's",
}


def env_file(settings: Mapping[str, str]) -> str:
    """Return the text of a file for `--env-file`. Both programs evaluate the file with their built-in shell.

    The program in the container sees the image's variables, overridden by `settings`. Values arrive
    literally (commas, quotes, `$`, backquotes and newlines; seen). PYTHONNOUSERSITE=1 and
    LANG=C.UTF-8 are set if `settings` has no other values for them.

    A file is used for two reasons. First, `--env` would show values in the process list, and splits values at commas.
    Second, SingularityCE reads only SINGULARITYENV_*, and Apptainer prints a message if it reads SINGULARITYENV_*.

    Names with a special meaning (seen):
      PATH                        replaces the image's PATH
      PREPEND_PATH, APPEND_PATH   extend the image's PATH; Apptainer 1.5 and later has the same for LD_LIBRARY_PATH
      LD_LIBRARY_PATH             replaces the image's value; the runtime adds /.singularity.d/libs

    Args:
        settings: variables for the program in the container.

    Raises:
        UsageError: a name or value would not arrive unchanged.
    """
    lines = []
    for name, value in {**_DEFAULTS, **settings}.items():
        _check_setting(name, value)
        lines.append(f"{name}={shlex.quote(value)}")
    return "\n".join(lines) + "\n"


def with_env_file(argv: Sequence[str], path: str) -> tuple[str, ...]:
    """Return a command of `exec_argv` that also reads its variables from the file of `env_file`."""
    at = argv.index("exec") + 1
    return (*argv[:at], "--env-file", path, *argv[at:])


def with_own_network(argv: Sequence[str]) -> tuple[str, ...]:
    """Return a command of `exec_argv` whose program has a private network: 127.0.0.1, without the node's network.

    Only `--network none` works without root and without a configuration (seen).
    """
    at = argv.index("exec") + 1
    return (*argv[:at], "--net", "--network", "none", *argv[at:])


def host_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of the caller that the runtime's process itself needs.

    Variables that begin with APPTAINER or SINGULARITY are not inherited: they would silently change binds,
    options and variables.
    """
    return {name: inherited[name] for name in _HOST_NAMES if name in inherited}


def start_environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the runtime's process that starts a container."""
    # In SingularityCE 4, this variable is the option --no-oci, and has priority over `oci mode = yes` of a site
    # (runtime.py). Apptainer has no such option, and does not read the variable.
    return {**host_environment(inherited), "SINGULARITY_NO_OCI": "1"}


def _check_setting(name: str, value: str) -> None:
    why = _UNSETTABLE.get(name)
    if not _NAME.fullmatch(name):
        why = "a name must consist of letters, digits and `_`, and must not begin with a digit"
    elif name.startswith(("APPTAINER", "SINGULARITY")):
        why = "the container runtime uses variables with this name itself"
    if why is not None:
        raise UsageError(f"the variable {name!r} cannot be set in a container", why=why)
    _literal(f"value of {name}", value)
    if "\r\n" in value:
        raise UsageError(
            f"the value of {name} has lines that end with a carriage return",
            # Seen with Apptainer 1.4.5. Both programs read variables, and also APPTAINERENV_*, with mvdan.cc/sh
            # (syntax/lexer.go).
            why="the container runtime removes it",
            hint="pass the value in a file, or without carriage returns",
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the value of {name} is not UTF-8 text",
            why="Apptainer replaces other bytes by question marks",
            hint="pass the value in a file",
        ) from error


# --- the time of an image --------------------------------------------------------------

_EARLIEST = 315532800  # 1980-01-01T00:00:00Z


def source_date_epoch(
    created: str | None,
    history: Sequence[str] = (),
    on_line: Callable[[str], None] = _say_nothing,
) -> int:
    """Return the SOURCE_DATE_EPOCH for an image. This time belongs to the image, not to the build.

    mksquashfs sets later file times back to this time. This time must not be earlier than the image's newest file. With
    an earlier time, Python considers its compiled files outdated, compiles them again at each start and cannot write
    the result (seen: `import torch` takes twice as long).

    The rule: take the image's `created`, rounded up to the second. If this time is missing or before 1980 (Bazel,
    Kaniko and Nix write 1970 or year 1), take the newest usable `created` in the image's history. If there is no such
    time, the result is 1980-01-01, and `on_line` gets a message.

    Args:
        created: `created` of the image's configuration, RFC 3339.
        history: `created` of the image's history entries.
        on_line: called with one line for the user.
    """
    for times in ([created], history):
        usable = [seconds for seconds in map(_seconds, times) if seconds is not None]
        if usable:
            return max(usable)
    on_line("hpcenv: the image has no creation time; file times after 1980-01-01 are set back to 1980-01-01")
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
    # squashfs stores seconds in 32 bits.
    return seconds if _EARLIEST <= seconds < 2**32 else None


# --- errors ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Sign:
    """A pattern in Apptainer's output, and the error for the user.

    Attributes:
        names_place: whether the error says which temporary folder was used.
    """

    text: str
    error: type[HpcenvError]
    what: str
    hint: Hint
    names_place: bool = False


# Apptainer's own failures all have status 255 and `FATAL:` on stderr, so the text shows which failure it is. The first
# match counts, so causes come before their consequences. Texts are from Apptainer 1.4.5 and from the
# numbered issues of github.com/apptainer/apptainer.
_SIGNS = (
    _Sign(
        text=r"no space left on device|short write: write \S*build-temp",  # 546, 1380
        error=ToolFailed,
        what="there is not enough space to convert the image",
        hint="set TMPDIR to a folder on a local disk with more space, four times the image's compressed size; "
        "check the space at the destination, too",
        names_place=True,
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
        # Issues 2027, 2360, 2457, 3753; the second pattern is Ubuntu's AppArmor restriction.
        text=r"create user namespace: not allowed|not allowed to create user namespace"
        r"|write info to setgroups: permission denied|user namespaces? .{0,40}disabled",
        error=ToolFailed,
        what="this machine does not let you create user namespaces",
        hint="look at `sysctl user.max_user_namespaces kernel.apparmor_restrict_unprivileged_userns`; "
        "an administrator can allow them or install apptainer-suid",
    ),
    _Sign(
        # This comes before the patterns for a registry: pip, apt and git in %post print the same texts about other
        # hosts. Apptainer 1.4.5.
        text=r"while running %post section",
        error=ToolFailed,
        what="a command of the definition file's %post failed",
        hint="the lines before the last line are its output; pip and apt need an index that they can reach from here",
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
        what="the registry no longer has an image with that digest",
        hint=(
            "run ",
            Command("hpcenv", "lock"),
            " again to lock the image that the tag names now, or ask for the old image",
        ),
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
        hint="build on a machine that can reach it, often the login node",
    ),
    _Sign(
        text=r"i/o timeout|deadline exceeded|connection timed out|network is unreachable"
        r"|no route to host|connection reset by peer|unexpected eof",
        error=ImageUnavailable,
        what="the connection to the registry was interrupted",
        hint="try again; check firewalls and proxies between here and the registry",
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
        names_place=True,
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
        what="the SIF cannot be written to its folder",
        hint="check the folder's permissions, and whether another user has a file with that name",
    ),
    _Sign(
        text=r"could not open image .*: no such file or directory",
        error=ToolFailed,
        what="the SIF does not exist",
        hint="check the path on this node; the file system may not be mounted here",
    ),
    _Sign(
        text=r"unknown compression algorithm value 6",  # SingularityCE 4.5.1, pkg/image/squashfs.go
        error=ToolFailed,
        what="SingularityCE does not read this SIF: it is compressed with zstd",
        hint=(
            "make it again with gzip: ",
            Command("hpcenv", "image", "build", "--compression", "gzip"),
            "; the lockfile stays valid, because the tree is the same",
        ),
    ),
    _Sign(
        text=r"bad superblock|trying to read the squashfs image",  # 952, 2121, 2458
        error=ImageMismatch,
        what="the SIF is damaged, or this node's kernel does not support its compression",
        hint="compare its size and sha256 with the lock, and copy it again",
    ),
    _Sign(
        text=r"unknown userid \d+|determine user account information",
        error=ToolFailed,
        what="this node does not know your user account",
        hint="report it to your site: the node's user directory (LDAP, SSSD) does not answer",
    ),
)


def known_cause(
    output: str, why: str, *, argv: Sequence[str], status: int | None, place: str = ""
) -> HpcenvError | None:
    """Return the error for an output whose cause is known. The arguments are as for `explain`."""
    sign = next((one for one in _SIGNS if re.search(one.text, output, re.IGNORECASE)), None)
    if sign is None:
        return None
    why = f"{why}\n{place}" if place and sign.names_place else why
    if sign.error is ToolFailed:
        return ToolFailed(sign.what, argv=tuple(argv), status=status, stderr=output, why=why, hint=sign.hint)
    return sign.error(sign.what, why=why, hint=sign.hint)


def explain(output: str, *, argv: Sequence[str], status: int | None, place: str = "") -> HpcenvError:
    """Return the error for a failed apptainer, from its output.

    Args:
        output: the end of Apptainer's output.
        argv: the command.
        status: the exit status; None if the time limit was reached.
        place: for a build, a sentence that says where the temporary files were.
    """
    important = [line for line in output.splitlines() if re.match(r"(FATAL|ERROR|hpcenv)\b", line)]
    why = "\n".join(important or output.splitlines()[-5:])[-2000:] or "it wrote nothing"
    if status is None:
        return ToolFailed(
            "apptainer did not finish in time",
            argv=tuple(argv),
            stderr=output,
            why=why,
            hint="check the file systems and the network that it uses",
        )
    return known_cause(output, why, argv=argv, status=status, place=place) or ToolFailed(
        f"apptainer ended with status {status}",
        argv=tuple(argv),
        status=status,
        stderr=output,
        why=why,
        hint="run the command by hand with --debug to see more",
    )
