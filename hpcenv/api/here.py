"""Read environment, folder and clock for the functions of the API. Runs on: LOGIN NODE."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from hpcenv.project import acceptance
from hpcenv.project.acceptance import Asked
from hpcenv.project.context import Context, cache_folder, of_user, user_folder
from hpcenv.project.workspace import Workspace, open_workspace
from hpcenv.submission.choose_store import find_store


def project_folder(project: str | Path) -> Path:
    """Return the folder of a project as an absolute path, without resolving symbolic links."""
    return Path(os.path.abspath(user_folder(os.environ) / Path(project).expanduser()))


def open_here(project: str | Path, command: Sequence[str]) -> tuple[Workspace, Context]:
    """Open the project. Read environment, folder and clock for the functions that use the project.

    Args:
        command: the command that is recorded for this call.
    """
    return open_project(project), context_in(project_folder(project), command)


def context_in(folder: Path, command: Sequence[str]) -> Context:
    """Return environment, folder and clock in one value, which the caller passes to other functions."""
    return Context(
        environ=of_user(os.environ),
        cwd=folder,
        now=time.localtime(),
        token=secrets.token_hex(2),
        command=tuple(command),
        cache=cache_folder(os.environ),
    )


def open_project(project: str | Path = ".") -> Workspace:
    """Open the project of a folder: its hpcenv.toml is in this folder or in a folder above.

    Raises:
        SpecError: no folder has an hpcenv.toml, or the file is not valid.
    """
    folder = project_folder(project)
    store = os.environ.get("HPCENV_STORE")
    return open_workspace(
        folder,
        store=(Path(os.path.abspath(folder / Path(store).expanduser())), "HPCENV_STORE") if store else None,
        default_store=lambda root, site: find_store(context_in(folder, ()), root, site),
        trusted_owners=tuple(os.environ.get("HPCENV_STORE_OWNERS", "").replace(",", " ").split()),
    )


def require_accepted(workspace: Workspace, accept: str | None, more: Sequence[Asked] = ()) -> None:
    """Refuse a project if the user has not accepted its requests. A program cannot answer a question, so none is asked.

    Args:
        accept: the digest of the list of requests that the user accepts; None if the caller gave no digest.
        more: requests of a record in the project, in addition to those of hpcenv.toml.

    Raises:
        NotAccepted: the user has not accepted the requests. The error contains the list of requests and the digest of
            this list.
    """
    asked = (*acceptance.asked_by(workspace), *more)
    hint = f'read hpcenv.toml, then: accept="{acceptance.digest_of(asked)}"'
    acceptance.require(asked, workspace.root, of_user(os.environ), given=accept, hint=hint)
