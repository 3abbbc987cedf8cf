"""Write a training for another engine: `hpcenv submit --export DIR --format ...`. Runs on: LOGIN NODE."""

from __future__ import annotations

import importlib
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hpcenv import filesystem
from hpcenv.errors import UsageError
from hpcenv.exports import training as trainings
from hpcenv.exports.engine import Claim, EngineFiles, Files
from hpcenv.exports.training import Training
from hpcenv.project.context import Context
from hpcenv.project.workspace import Workspace
from hpcenv.submission import snapshot
from hpcenv.submission.handover import Handover, require_exportable
from hpcenv.submission.request import SubmitOptions

# The name of an engine is the name of its module in `formats/`.
ENGINES = ("compose", "kubernetes", "trainjob", "skypilot")
_WITH_CLAIMS = ("kubernetes", "trainjob")
# The rule for names of objects (Kubernetes 1.34, "Object Names and IDs", DNS subdomain names).
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_CLAIM_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_LONGEST_CLAIM = 253


def export_training(
    workspace: Workspace, options: SubmitOptions, context: Context, folder: Path, *, engine: str, volume: str | None
) -> Handover:
    """Write the folder; start nothing.

    Args:
        folder: the new folder, which must not exist.
        engine: one of `ENGINES`.
        volume: `CLAIM:/path`, a volume claim of a Kubernetes cluster and its path in the container. The volume has the
            code.

    Raises:
        HpcenvError: the training cannot be exported. The folder is removed.
    """
    require_exportable(options, folder)
    claim, files = _claim(volume, engine), Files(folder)
    named = replace(options, name=folder.name, handover=True)
    training, code = trainings.find(workspace, named, context, files.code.path)
    render: Callable[[Training, Files, Claim | None], EngineFiles]
    render = importlib.import_module(f"hpcenv.exports.formats.{engine}").render
    assert code.source is not None
    try:
        files.code.path.mkdir(parents=True)
        snapshot.make(code.source, files.code)
        snapshot.require_unchanged(code.source, "", context.environ)
        files.write(training)
        rendered = render(training, files, claim)
        for name, text in rendered.files.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise filesystem.refused(folder, error) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Handover(
        folder=folder,
        shape=training.request.shape,
        needs=rendered.needs,
        lost=(*training.lost, *rendered.lost),
        start=rendered.start,
        notes=training.notes,
    )


def _claim(volume: str | None, engine: str) -> Claim | None:
    if volume is None:
        return None
    name, colon, path = volume.partition(":")
    if engine not in _WITH_CLAIMS:
        raise UsageError(
            "`--volume` is for Kubernetes",
            why=f"with --format {engine}, the code is in the folder",
            hint=f"leave --volume out, or use --format {' or '.join(_WITH_CLAIMS)}",
        )
    folder, own = path.rstrip("/"), trainings.OWN_FOLDER
    problem = None
    if not colon or not _CLAIM_NAME.fullmatch(name) or len(name) > _LONGEST_CLAIM:
        problem = "a claim has a name of small letters, digits, `-` and `.` (RFC 1123), and `:` is before the path"
    elif not re.match("/[^/]", folder) or os.path.normpath(folder) != folder or ":" in folder:
        problem = "the path is an absolute path of a folder below /, without `..` and `:`"
    elif folder == own or folder.startswith(f"{own}/"):
        problem = f"hpcenv mounts its own files below {own}"
    if problem is not None:
        raise UsageError(f"`--volume {volume}` cannot be used", why=problem, hint="for example --volume team:/team")
    return Claim(name=name, path=folder)
