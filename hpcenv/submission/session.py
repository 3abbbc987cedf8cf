"""A session as a run: its options, its permanent folder, and the public keys that may connect to the session.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv import process
from hpcenv.errors import Command, FileUnusable, UsageError, WouldOverwrite
from hpcenv.project.workspace import Workspace
from hpcenv.records.files import write_text
from hpcenv.records.session import SessionFolder, SessionOptions, SessionService
from hpcenv.runs.entries import Submitted
from hpcenv.runs.find import list_runs
from hpcenv.runs.state import read_states
from hpcenv.sessions.folders import require_private
from hpcenv.sessions.ssh import parse_keys
from hpcenv.submission.request import SubmitOptions, detect_cluster

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,39}\Z")


def with_session(
    workspace: Workspace,
    options: SubmitOptions,
    name: str,
    environ: Mapping[str, str],
    *,
    services: Sequence[SessionService] = (),
    allow_port: bool = False,
    ends_unused: int = 0,
) -> SubmitOptions:
    """Return the options of a session.

    Args:
        options: the options of the command line.
        name: the name of the session.
        environ: environment variables, for the Slurm commands.
        services, allow_port, ends_unused: see `SessionOptions`.

    Raises:
        UsageError: the name is not valid, or there is no Slurm.
        WouldOverwrite: a session with this name has not ended.
    """
    if not _NAME.match(name) or name == "latest":
        hint = "a letter, then letters, digits, '.', '_' and '-', at most 40"
        raise UsageError(f"{name!r} is not the name of a session", hint=hint)
    if (options.cluster or detect_cluster(environ)) != "slurm":
        why = "a session is a job; hpcenv starts no session on this machine itself, because it may be a login node"
        raise UsageError("a session needs Slurm", why=why, hint=Command("hpcenv", "run"))
    runs = workspace.runs if options.runs_dir is None else Path(options.runs_dir)
    runs = Path(os.path.abspath(runs))
    known = [run for run in list_runs(runs) if isinstance(run, Submitted) and run.submission.session == name]
    earlier = [run for run in known if run.folder.path.stat().st_uid == os.getuid()]
    for run, state in zip(earlier, read_states(earlier, environ), strict=True):
        if not state.quiet:
            raise WouldOverwrite(
                f"the session `{name}` has not ended",
                why=f"its run `{run.submission.run}` is {state.state}",
                hint=(Command("hpcenv", "attach", name), " enters it; to end it: ", Command("hpcenv", "cancel", name)),
            )
    # Other users may have their runs in this folder, too.
    folder = runs / f".sessions-{os.getuid()}" / name
    session = SessionOptions(
        name=name,
        folder=str(folder),
        services=tuple(services),
        allow_port=allow_port,
        ends_unused=ends_unused,
    )
    return replace(options, script=None, session=session)


def read_keys(file: Path | None, home: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the public keys that may connect to a session, and notes.

    Args:
        file: the file of `--key`; None for the user's authorized_keys.
        home: the home folder of the user.

    Raises:
        FileUnusable: the file cannot be read, or has no usable key.
    """
    path = file or home / ".ssh" / "authorized_keys"
    try:
        keys, others = parse_keys(path.read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        if file is None:
            return (), (f"no ssh into this session: {path}: {error.strerror}; --key FILE names your public key",)
        raise FileUnusable(f"cannot read the key `{path}`", why=error.strerror) from error
    left_out = f"{others} lines of {path} have options or are no public keys: these keys do not open the session"
    if file is not None and not keys:
        why = left_out if others else "the file is empty"
        raise FileUnusable(f"`{path}` has no public key", why=why, hint="name a file like ~/.ssh/id_ed25519.pub")
    return keys, (left_out,) if others else ()


def prepare_folder(folder: SessionFolder, keys: Sequence[str]) -> None:
    """Make the permanent folder of a session, with its host key, and write the public keys that may connect.

    Raises:
        FileUnusable: the folder cannot be made, or other users can read it.
        ToolMissing, ToolFailed: ssh-keygen cannot make the host key.
    """
    try:
        folder.path.parent.parent.mkdir(parents=True, exist_ok=True)
        for path in (folder.path.parent, folder.path, folder.home):
            if not os.path.lexists(path):
                path.mkdir(mode=0o700)
            require_private(path)
        write_text("".join(f"{key}\n" for key in keys), folder.authorized_keys, mode=0o600)
    except OSError as error:
        raise FileUnusable(f"cannot make the folder of the session `{folder.path}`", why=str(error)) from error
    if not folder.host_key.exists():
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", folder.path.name, "-f", str(folder.host_key)]
        process.run(argv, timeout=60)
    elif not folder.public_key.exists():
        known = process.run(["ssh-keygen", "-y", "-f", str(folder.host_key)], timeout=60).stdout
        write_text(known, folder.public_key)
