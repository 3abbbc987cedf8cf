"""`hpcenv export`: the lockfile as pylock.toml, requirements.txt, environment.yml or CycloneDX.

Runs on: LOGIN NODE; needs the lockfile, not the environment.

Only pylock.toml needs more: PEP 751 wants URLs, and a lockfile holds none, because they are of the user's own index
and change. They are asked for when it is written, through pip's configuration and session, and one is taken for a
file whose sha256 is the locked one. `pip install --dry-run --report` would be public but resolves: it names one file
of its own choice (a folder of this machine before an index with the very same file), for this machine's Python only,
and downloads whole wheels where an index has no PEP 658 metadata. So the lists of adapters/wheels.py are read, in a
process of their own as there; nothing is downloaded but lists.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcenv import wire
from hpcenv.adapters import process, toml_files
from hpcenv.errors import HpcenvError, ToolFailed, ToolMissing, WouldOverwrite
from hpcenv.model import export as export_model
from hpcenv.model.export import Format, LeftOut, Rendered, WheelLink, WheelUrl
from hpcenv.model.lockfile import DistTable, Lockfile
from hpcenv.steps.workspace import DEFAULT_LOCK, open_workspace, read_lockfile

# For all packages together: a list has at most a few MB, and eight are read at a time.
_SECONDS = 60.0
_WORKERS = 8


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """An export.

    Attributes:
        lockfile: what was exported.
        text: all of it.
        count: packages in it.
        left_out: packages that are not in it, with reasons.
        notes: what its reader has to know.
        path: where it was written, None when it was not.
        replaced: whether an earlier export of this kind was there.
    """

    kind: Format
    lockfile: Path
    fingerprint: str
    text: str
    count: int
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()
    path: Path | None = None
    replaced: bool = False


def export(
    start: Path,
    kind: Format,
    *,
    environ: Mapping[str, str],
    name: str = DEFAULT_LOCK,
    output: Path | None = None,
) -> ExportResult:
    """Export a lockfile.

    Args:
        start: where the user is.
        kind: which format.
        environ: the user's environment; pip finds its configuration through it.
        name: one of the project's lockfiles, or the path of any (it ends with `.lock.toml`).
        output: a file to write; None only returns the text.

    Raises:
        LockfileMissing, LockfileInvalid, LockfileNewer: there is nothing to export.
        WouldOverwrite: `output` is there, and no export of this kind.
        ToolFailed: pip's index gave no URLs; nothing is written.
    """
    path = _lockfile_path(start, name)
    locked = read_lockfile(path)
    place = None if output is None else Path(os.path.realpath(output))
    # Before an index is asked: what is in the way is in the way without it.
    replaced = place is not None and _is_replaceable(place, kind)
    rendered = _render(locked, kind, environ=environ, name=path.name.removesuffix(".lock.toml"))
    notes = rendered.notes
    if place is not None:
        wire.write_text(rendered.text, place)
        notes = (*notes, *_about_name(place, kind))
    return ExportResult(
        kind=kind,
        lockfile=path,
        fingerprint=locked.fingerprint,
        text=rendered.text,
        count=rendered.count,
        left_out=rendered.left_out,
        notes=notes,
        path=place,
        replaced=replaced,
    )


def _lockfile_path(start: Path, name: str) -> Path:
    if name.endswith(".lock.toml"):
        return Path(os.path.abspath(start / name))
    return open_workspace(start).lockfile_path(name)


def _is_replaceable(path: Path, kind: Format) -> bool:
    """Say whether an export of this kind is there; anything else must not be lost.

    Raises:
        WouldOverwrite: it is something else.
    """
    if not os.path.lexists(path):
        return False
    hint = "choose another name, or move it away"
    if not path.is_file():
        raise WouldOverwrite(f"`{path}` is not a file", hint=hint)
    if not export_model.is_ours(kind, path.read_text(encoding="utf-8", errors="replace")):
        raise WouldOverwrite(f"`{path}` is there", why=f"it was not written by `hpcenv export {kind}`", hint=hint)
    return True


def _about_name(path: Path, kind: Format) -> tuple[str, ...]:
    if kind != "pylock":
        return ()
    from packaging.pylock import is_valid_pylock_path

    if is_valid_pylock_path(path):
        return ()
    return (f"installers take it for requirements: PEP 751 wants pylock.toml or pylock.NAME.toml, not {path.name}",)


def _render(locked: Lockfile, kind: Format, *, environ: Mapping[str, str], name: str) -> Rendered:
    if kind == "requirements":
        return export_model.requirements(locked)
    if kind == "environment":
        return export_model.environment(locked, name=name)
    if kind == "pylock":
        return _pylock(locked, environ)
    try:
        return export_model.cyclonedx(locked)
    except ImportError as error:
        raise ToolMissing(
            "cyclonedx-python-lib is not installed", why=str(error), hint="pip install cyclonedx-python-lib"
        ) from error


# -- pylock.toml: URLs ----------------------------------------------------------------------------------------------


def _pylock(locked: Lockfile, environ: Mapping[str, str]) -> Rendered:
    from packaging.pylock import Pylock

    document = export_model.pylock(locked, _urls(export_model.wheels_to_find(locked), environ))
    Pylock.from_dict(document.data)
    text = toml_files.dumps(document.data, header=document.header)
    count = len(document.data["packages"])
    return Rendered(text=text, count=count, left_out=document.left_out, notes=document.notes)


def _urls(dists: Sequence[DistTable], environ: Mapping[str, str]) -> dict[str, WheelUrl]:
    """Return where each wheel is to be had.

    Raises:
        ToolFailed: an index that may know a missing one did not answer, or none is known at all.
    """
    if not dists:
        return {}
    answers = _ask(dists, environ)
    urls = {}
    silent: dict[str, list[str]] = {}
    for dist, answer in zip(dists, answers, strict=True):
        urls[dist.name] = export_model.choose_url(dist, [WheelLink(**link) for link in answer["links"]])
        if urls[dist.name].url is None:
            for trouble in answer["trouble"]:
                silent.setdefault(trouble, []).append(dist.name)
    if silent:
        raise _no_urls("\n".join(f"{why}; asked for {_some(names)}" for why, names in sorted(silent.items())))
    if not any(found.url for found in urls.values()):
        raise _no_urls("\n".join(f"{name}: {found.reason}" for name, found in list(urls.items())[:5]))
    return urls


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _no_urls(why: str) -> ToolFailed:
    return ToolFailed(
        "cannot find the URLs of the locked wheels",
        why=why,
        hint="run it where pip reaches its index (`pip config list` says which),\n"
        "      or `hpcenv export requirements`, which needs no index",
    )


def _ask(dists: Sequence[DistTable], environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Start the other half of this file, beside pip.

    Raises:
        ToolFailed: it gave no answer. Without pip's own words: they hold URLs, and these may hold passwords.
    """
    root = str(Path(__file__).resolve().parents[2])
    # Not the user's folder: their `queue.py` must not stand in for what pip imports.
    program = (
        "import sys; sys.path[:] = [*filter(None, sys.path), sys.argv[1]]\n"
        "from hpcenv.steps.export import serve; serve()"
    )
    request = {"packages": [[dist.name, dist.version] for dist in dists], "seconds": _SECONDS}
    try:
        done = process.run(
            [sys.executable, "-B", "-c", program, root], timeout=_SECONDS + 10, env=environ, stdin=json.dumps(request)
        )
        reply = json.loads(done.stdout.splitlines()[-1])
    except HpcenvError as error:
        status = getattr(error, "status", None)
        said = f"no answer within {_SECONDS:g} s" if status is None else f"it ended with status {status}"
        raise _no_urls(f"pip's process: {said}") from None
    except (ValueError, IndexError):
        raise _no_urls("pip's process gave no answer") from None
    if reply.get("error"):
        raise _no_urls(reply["error"])
    answers: list[dict[str, Any]] = reply["answers"]
    return answers


def serve() -> None:
    """Read names and versions from stdin, write every wheel that pip's indexes list of them to stdout, as JSON.

    The other half, in a process of its own: pip is not made to be imported into a program.
    """
    request = json.load(sys.stdin)
    # pip may print (a keyring, a warning): stdout is for the answer only.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        reply: dict[str, Any] = {"answers": _look_up(request["packages"], request["seconds"])}
    except ImportError:
        reply = {"error": "the Python that runs hpcenv has no pip to ask an index with"}
    except BaseException as error:  # noqa: BLE001 - SystemExit for a broken pip.conf, AttributeError for a new pip
        reply = {"error": f"pip could not be set up ({type(error).__name__}): its configuration or version"}
    out.write(json.dumps(reply) + "\n")
    out.flush()


def _look_up(packages: Sequence[Sequence[str]], seconds: float) -> list[dict[str, Any]]:
    from concurrent.futures import ThreadPoolExecutor

    from hpcenv.adapters import wheels

    # The one reader of lists with pip's session; its own answer has no URLs, on purpose.
    lists = wheels._Lists(wheels._Pip(time.monotonic() + seconds))  # noqa: SLF001

    def look(package: Sequence[str]) -> dict[str, Any]:
        found: list[dict[str, Any]] = []
        try:
            links, trouble = lists.of((wheels._normal(package[0]), wheels._version(package[1])))  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - one odd page must not hide the others
            return {"links": found, "trouble": [f"its list could not be read ({type(error).__name__})"]}
        for link in links:
            url = None if link.local else link.place
            found.append({"filename": link.filename, "url": url, "sha256": link.sha256})
        return {"links": found, "trouble": trouble}

    with ThreadPoolExecutor(_WORKERS) as pool:
        return list(pool.map(look, packages))
