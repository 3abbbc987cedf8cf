"""Write a training for another engine: `hpcenv submit --export DIR --format ...`. Runs on: LOGIN NODE."""

from __future__ import annotations

import importlib
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


def export_training(
    workspace: Workspace, options: SubmitOptions, context: Context, folder: Path, *, engine: str, volume: str | None
) -> Handover:
    """Write the folder; start nothing.

    Args:
        folder: the new folder. It must not exist.
        engine: one of `ENGINES`.
        volume: `CLAIM:/path`, the claim of a Kubernetes cluster that has the code, and its path.

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
        raise UsageError("`--volume` is for Kubernetes", why=f"with --format {engine}, the code is in the folder")
    if not name or not colon or not path.startswith("/"):
        raise UsageError(f"`--volume {volume}` is not CLAIM:/path")
    return Claim(name=name, path=path.rstrip("/"))
