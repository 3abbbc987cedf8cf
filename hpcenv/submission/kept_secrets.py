"""Send the values of `env:NAME` secrets to the nodes, in a file of the user instead of through Slurm.

Runs on: LOGIN NODE. sbatch would store the environment with the job, and other people could read the values there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import FileUnusable, RunFolderNotShared, UsageError
from hpcenv.project.context import Context, state_folder
from hpcenv.project.workspace import Workspace
from hpcenv.records import secret_file
from hpcenv.records.manifest import Manifest, Secret
from hpcenv.records.variables import looks_like_credential
from hpcenv.submission.launch_options import check_secrets
from hpcenv.submission.request import SubmitOptions

# sbatch itself needs these variables.
_NEEDED_BY_SBATCH = ("PATH", "HOME")


def hide_credentials(options: SubmitOptions, context: Context) -> tuple[SubmitOptions, Context, tuple[str, ...]]:
    """Turn each `--env NAME=VALUE` into a secret if its name looks like the name of a credential.

    Returns:
        The options with `--secret NAME=env:NAME` instead of `--env`, the context with the variable NAME, and a note.
    """
    found = {name: value for name, value in options.env.items() if looks_like_credential(name)}
    if not found:
        return options, context, ()
    given = {name: value for name, value in found.items() if options.secret.get(name, f"env:{name}") == f"env:{name}"}
    note = (
        f"{', '.join(given)}: treated as --secret NAME=env:NAME, because the name looks like the name of a credential"
    )
    secret = {**options.secret, **{name: f"env:{name}" for name in given}}
    env = {name: value for name, value in options.env.items() if name not in found}
    context = replace(context, environ={**context.environ, **given})
    return replace(options, env=env, secret=secret), context, (note,) * bool(given)


def secrets_of(workspace: Workspace, options: SubmitOptions, environ: Mapping[str, str]) -> tuple[Secret, ...]:
    """Return the secrets of the run. If this process has the value of a secret, the secret is marked as kept."""
    found = {
        name: Secret(name=name, source=source, origin=f"[secrets] in {workspace.spec}")
        for name, source in workspace.project.secrets.items()
    }
    found |= {name: Secret(name=name, source=source, origin="--secret") for name, source in options.secret.items()}
    check_secrets(found.values())
    named = tuple(found[name] for name in sorted(found))
    return mark_kept(named, environ) if options.trains and not options.handover else named


def file_of(named: Sequence[Secret], run_folder: Path, environ: Mapping[str, str]) -> str:
    """Return the path of the file for the values of secrets; empty if no secret is kept."""
    if not any(secret.kept for secret in named):
        return ""
    return str(secret_file.path_of(state_folder(environ), str(run_folder)))


def mark_kept(secrets: Sequence[Secret], environ: Mapping[str, str]) -> tuple[Secret, ...]:
    """Mark a secret as kept if this process has its value. The values of all other secrets are read in the job."""
    return tuple(replace(secret, kept=True) if _variable(secret) in environ else secret for secret in secrets)


def values_of(secrets: Sequence[Secret], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the values of the kept secrets: variable -> value."""
    return {_variable(secret): environ[_variable(secret)] for secret in secrets if secret.kept}


def _variable(secret: Secret) -> str:
    """Return the variable that has the value of a secret; empty if the value is in a file."""
    kind, _, name = secret.source.partition(":")
    return name if kind == "env" else ""


def require_visible(secrets: Sequence[Secret], context: Context) -> list[str]:
    """Refuse kept secrets if nodes cannot see the user's state folder. If this is not known, return a note.

    Raises:
        RunFolderNotShared: nodes cannot see the state folder.
    """
    kept = [secret for secret in secrets if secret.kept]
    if not kept:
        return []
    state = state_folder(context.environ)
    seen = filesystem.visibility(state, home=Path(context.environ.get("HOME") or os.path.expanduser("~")))
    names = ", ".join(f"{secret.name} from {secret.source} ({secret.origin})" for secret in kept)
    if seen.shared is False:
        raise RunFolderNotShared(
            f"compute nodes cannot see `{state}`, where the values of secrets wait for the job",
            why=f"{seen.reason}; it is needed for {names}",
            hint=f"write the value into a file that nodes see, only for you: {kept[0].name}=file:PATH; "
            "or let XDG_STATE_HOME name a shared folder",
        )
    return [] if seen.shared else [f"cannot tell whether nodes see {state}, needed for {names}: {seen.reason}"]


def without(context: Context, values: Mapping[str, str]) -> Context:
    """Return a context for sbatch, without the variables that have the values of secrets."""
    hidden = set(values) - set(_NEEDED_BY_SBATCH)
    return replace(context, environ={name: v for name, v in context.environ.items() if name not in hidden})


def write(manifest: Manifest, values: Mapping[str, str], context: Context) -> None:
    """Write the file with the values of secrets for one run.

    Raises:
        FileUnusable: the user's state folder cannot be written.
    """
    if not values:
        return
    state = state_folder(context.environ)
    try:
        secret_file.write(state, manifest.run_folder, values)
    except OSError as error:
        raise FileUnusable(
            f"`{state}` cannot be written",
            why=f"{error.strerror}; the values of secrets wait there for the job",
            hint="let XDG_STATE_HOME name another folder, or use NAME=file:PATH",
        ) from error


def remove(run_folders: Sequence[str], context: Context) -> None:
    """Remove the files with the values of secrets for some runs."""
    secret_file.remove(state_folder(context.environ), run_folders)


def renew(manifests: Sequence[Manifest], context: Context) -> dict[str, str]:
    """Write the files with the values of secrets for runs that are queued again, and return the values.

    The old files were removed when the runs ended.

    Raises:
        UsageError: a variable is not set here, or the nodes would read the file in another state folder.
        FileUnusable: the user's state folder cannot be written.
    """
    found: dict[str, str] = {}
    state = state_folder(context.environ)
    for manifest in manifests:
        kept = [secret for secret in manifest.secrets if secret.kept]
        missing = [secret for secret in kept if _variable(secret) not in context.environ]
        if missing:
            name = _variable(missing[0])
            raise UsageError(
                f"the secret {missing[0].name} cannot be read from `{missing[0].source}`",
                why=f"{name} is not set here, and hpcenv keeps no value after the end of a run",
                hint=f"export {name}=...",
            )
        if kept and manifest.secret_values != str(secret_file.path_of(state, manifest.run_folder)):
            raise UsageError(
                f"the values of secrets of {manifest.run} cannot be written again",
                why=f"its nodes read {manifest.secret_values}, which is not in your state folder {state}",
                hint="submit it as a new run, or set XDG_STATE_HOME to its old value",
            )
        values = values_of(kept, context.environ)
        write(manifest, values, context)
        found |= values
    return found
