"""pylock.toml (PEP 751): every confirmed wheel with its current URL in an index.

Runs on: LOGIN NODE.

PEP 751 requires URLs. A lockfile contains no URLs, because URLs belong to the user's own index and change. So hpcenv
asks pip's session for the URLs (see locking/wheels/__init__.py), and uses only a file with the locked sha256. Only
lists are downloaded. `pip install --dry-run --report` is a public interface, but it runs pip's resolver. So pip's
report names only one file for each package, and only a file for this machine's Python. If a local folder and an index
have the same file, pip names the file in the folder. If an index has no PEP 658 metadata, pip downloads whole wheels.

The file lists all wheels under `wheels`. This includes wheels from a direct URL. PEP 751 has the key `archive` for
wheels from a direct URL, but the file and the hash would be the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import packaging.pylock
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hpcenv.errors import Command, ToolFailed
from hpcenv.locking.export_notes import (
    comment_on,
    has_header,
    header_lines,
    left_out_entry,
    notes_on_modified,
    summary_notes,
)
from hpcenv.locking.export_packages import (
    MODIFIED,
    VERSION,
    direct_url_of,
    is_modified,
    judged_packages,
    proved_sha256,
    public_url,
    python_version,
    why_no_wheel,
)
from hpcenv.locking.exporter import Exporter, ExportRequest, LeftOut, Rendered
from hpcenv.locking.wheels.pip_request import ask_for_links
from hpcenv.locking.wheels.proof import Index
from hpcenv.project import toml_files
from hpcenv.project.lockfile import DistTable, Lockfile
from hpcenv.text import listed

_SECONDS = 60.0  # time limit for all packages together: a list has at most a few MB
_WORKERS = 8

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,60}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pylock:
    """The content of a pylock.toml. `header` is the comment at the top of the file."""

    header: str
    data: dict[str, Any]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelLink:
    """A wheel in the list of an index or a folder.

    Attributes:
        url: None for a file on this machine.
        sha256: the hash in the list of the index; None if the list has no hash.
    """

    filename: str
    url: str | None
    sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelUrl:
    """The URL of a locked wheel, or the reason why it has no URL."""

    url: str | None = None
    remark: str = ""
    reason: str = ""


def wheels_to_find(lockfile: Lockfile) -> tuple[DistTable, ...]:
    """Return the packages for which an index must be asked for the URL of the wheel."""
    proved = (dist for dist, problem in judged_packages(lockfile, why_no_wheel) if not problem)
    return tuple(dist for dist in proved if direct_url_of(dist) is None)


def choose_url(dist: DistTable, links: Sequence[WheelLink]) -> WheelUrl:
    """Return the URL of a listed file that has the locked sha256.

    If the index states no sha256, a file with the locked name is used. pip compares its content with the locked sha256.
    """
    sha256, filename = proved_sha256(dist), dist.wheel.filename if dist.wheel else None
    same = [link for link in links if link.sha256 == sha256]
    named = [link for link in links if link.filename == filename and link.sha256 is None]
    for link in (*same, *named):
        url, problem = public_url(link.url) if link.url is not None else (None, "")
        if url is not None:
            remark = (
                "" if link.sha256 else "the index states no sha256 for it; pip compares the file with the locked sha256"
            )
            return WheelUrl(url=url, remark=remark)
        if problem:
            return WheelUrl(reason=problem)
    if same or named:
        return WheelUrl(reason="its wheel is in a folder on this machine (find-links), and no index has it")
    other = [link.sha256 for link in links if link.filename == filename and link.sha256]
    if other:
        return WheelUrl(reason=f"the index has a different file of that name: sha256 {other[0]}, locked {sha256}")
    return WheelUrl(reason=f"no index lists {filename or 'its wheel'}")


def pylock(lockfile: Lockfile, urls: Mapping[str, WheelUrl]) -> Pylock:
    """Return the content of a pylock.toml.

    Args:
        lockfile: the lockfile.
        urls: by package name, for every package of `wheels_to_find`.
    """
    header = header_lines("pylock", lockfile)
    left_out: list[LeftOut] = []
    pinned: list[DistTable] = []
    packages = []
    remarks = []
    for dist, unproved in judged_packages(lockfile, why_no_wheel):
        direct = None if unproved else direct_url_of(dist)
        wheel = WheelUrl(url=direct) if direct else urls.get(dist.name, WheelUrl(reason="its URL was not looked up"))
        filename = _wheel_name(dist, wheel.url) if wheel.url else None
        problem = unproved or wheel.reason or "the name of its wheel does not fit its name and version"
        if unproved or wheel.url is None or filename is None:
            left_out.append(left_out_entry(dist, problem))
            header.append(comment_on(dist, problem))
            continue
        if is_modified(dist):
            header.append(comment_on(dist, MODIFIED))
        if wheel.remark:
            remarks.append(f"{dist.name}: {wheel.remark}")
        packages.append(_package(dist, wheel.url, filename))
        pinned.append(dist)
    data = {"lock-version": "1.0", **_target_environment(lockfile), "created-by": "hpcenv", "packages": packages}
    return Pylock(
        header="\n".join(line.removeprefix("# ") for line in header),
        data=data,
        left_out=tuple(left_out),
        notes=(*summary_notes(lockfile, left_out), *notes_on_modified(pinned), *remarks),
    )


def _package(dist: DistTable, url: str, filename: str) -> dict[str, Any]:
    wheel = {"name": filename, "url": url, "hashes": {"sha256": proved_sha256(dist)}}
    return {"name": canonicalize_name(dist.name), "version": dist.version, "wheels": [wheel]}


def _wheel_name(dist: DistTable, url: str) -> str | None:
    """Return the wheel's file name; None if an installer would not accept the name for this package."""
    own = dist.wheel.filename if dist.wheel else None
    filename = own or unquote(urlsplit(url).path.rsplit("/", 1)[-1])
    try:
        name, version, _, _ = parse_wheel_filename(filename)
    except (InvalidWheelFilename, InvalidVersion):
        return None
    fits = (name, version) == (canonicalize_name(dist.name), Version(dist.version))
    return filename if fits and VERSION.fullmatch(filename) else None


def _target_environment(lockfile: Lockfile) -> dict[str, Any]:
    """Return the keys for the wheels' Python and machine. An installer refuses a different Python or machine."""
    parts = ["sys_platform == 'linux'"]
    for marker, field in (("platform_machine", "system.machine"), ("implementation_name", "python.implementation")):
        value = str(lockfile.facts.get(field, ""))
        if _WORD.fullmatch(value):
            parts.append(f"{marker} == '{value}'")
    release = re.match(r"3\.\d{1,3}(?!\d)", python_version(lockfile) or "")
    if release:
        parts.append(f"python_version == '{release[0]}'")
    keys: dict[str, Any] = {"environments": [" and ".join(parts)]}
    if release:
        keys["requires-python"] = f"=={release[0]}.*"
    return keys


# -- URLs from the index ------------------------------------------------------------------------------------------


def _render(lockfile: Lockfile, request: ExportRequest) -> Rendered:
    document = pylock(lockfile, _find_urls(wheels_to_find(lockfile), request.environ))
    packaging.pylock.Pylock.from_dict(document.data)  # raises if it is not valid
    text = toml_files.dumps(document.data, header=document.header)
    return Rendered(text=text, count=len(document.data["packages"]), left_out=document.left_out, notes=document.notes)


def _find_urls(dists: Sequence[DistTable], environ: Mapping[str, str]) -> dict[str, WheelUrl]:
    """Return the URL of each wheel.

    Raises:
        ToolFailed: a wheel is missing and an index did not answer, or no wheel was found at all.
    """
    if not dists:
        return {}
    packages = [(dist.name, dist.version) for dist in dists]
    reply = ask_for_links(packages, index=Index(env=environ), timeout=_SECONDS, workers=_WORKERS)
    if reply.get("error"):
        raise _no_urls(reply["error"])
    urls = {}
    troubles: dict[str, list[str]] = {}
    for dist, answer in zip(dists, reply["answers"], strict=True):
        urls[dist.name] = choose_url(dist, [WheelLink(**link) for link in answer["links"]])
        if urls[dist.name].url is None:
            for trouble in answer["trouble"]:
                troubles.setdefault(trouble, []).append(dist.name)
    if troubles:
        raise _no_urls("\n".join(f"{why}; needed for {listed(names, 3)}" for why, names in sorted(troubles.items())))
    if not any(wheel.url for wheel in urls.values()):
        raise _no_urls("\n".join(f"{name}: {wheel.reason}" for name, wheel in list(urls.items())[:5]))
    return urls


def _no_urls(why: str) -> ToolFailed:
    return ToolFailed(
        "cannot find the URLs of the locked wheels",
        why=why,
        hint=(
            "run it where pip reaches its index (",
            Command("pip", "config", "list"),
            " says which),\nor ",
            Command("hpcenv", "export", "requirements"),
            ", which needs no index",
        ),
    )


def _path_notes(path: Path) -> tuple[str, ...]:
    if packaging.pylock.is_valid_pylock_path(path):
        return ()
    return (f"PEP 751 requires the name pylock.toml or pylock.NAME.toml: installers read {path.name} as requirements",)


EXPORTER = Exporter(
    name="pylock",
    help="pylock.toml (PEP 751) for pip and uv; asks pip's index",
    render=_render,
    is_ours=has_header("pylock"),
    needs_index=True,
    path_notes=_path_notes,
)
