"""`hpcenv image init`: a Dockerfile and a definition file for a torch, CUDA and Python.

Runs on: LOGIN NODE. Asks a registry for the base's digest, and pip's index for the packages where no lock is given;
with `--base REF@DIGEST` and `--pylock FILE` it asks nobody.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpcenv import wire
from hpcenv.adapters import process, registry, toml_files
from hpcenv.adapters.pins import marker_environment, read_pins
from hpcenv.errors import HpcenvError, LockfileInvalid, SpecError, ToolFailed, WouldOverwrite
from hpcenv.model import compat, image_recipe
from hpcenv.model.image_recipe import Base, Choice, Pin, Recipe

DEFAULT_SYSTEM = "bookworm"

# An index without PEP 658 metadata makes pip fetch whole wheels, of torch too.
_RESOLVE_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class InitResult:
    """A recipe that was written.

    Attributes:
        image: its name and tag.
        files: what was written.
        packages: how many are locked.
        notes: what its reader has to know.
    """

    folder: Path
    image: str
    torch: str
    cuda: str
    python: str
    os: str
    base: str
    files: tuple[Path, ...]
    packages: int
    notes: tuple[str, ...] = ()


def init(
    folder: Path,
    *,
    environ: Mapping[str, str],
    name: str,
    torch: str | None = None,
    cuda: str | None = None,
    python: str | None = None,
    system: str = DEFAULT_SYSTEM,
    lock: Path | None = None,
    extra: Sequence[str] = (),
    base: str | None = None,
    base_has_python: bool = False,
    system_packages: Sequence[str] = (),
    plain_http: Sequence[str] = (),
    table: Path | None = None,
    force: bool = False,
) -> InitResult:
    """Write a recipe.

    Args:
        folder: where its files go.
        environ: the user's environment; pip finds its configuration through it.
        name: the image's name, without tag.
        torch: release; None for the lock's, or the newest that the Python may have.
        cuda: `12.6`, `cpu`, or None for the lock's, or that of the default index.
        python: `3.11`, or None for the distribution's own.
        system: the distribution.
        lock: pylock.toml, uv.lock or requirements with hashes; None asks pip's index now.
        extra: more requirements for pip, where no lock is given.
        base: `NAME[:TAG]@sha256:...`, `NAME:TAG` (resolved now) or a SIF; None for the official image.
        base_has_python: the base brings the Python, so none is installed.
        system_packages: more packages for apt.
        plain_http: registries that are spoken to without TLS.
        table: another compatibility table.
        force: replace files that are not hpcenv's.

    Raises:
        SpecError: an impossible combination, with the possible ones.
        FileUnusable, LockfileInvalid: the lock cannot be read, or is none.
        ImageUnavailable: the base cannot be resolved.
        ToolFailed: pip found no packages.
        WouldOverwrite: a file is in the way; nothing is written.
    """
    known = _table(table)
    pins = None if lock is None else pins_of(lock, python or _system_python(system))
    choice = _choice(known, pins, torch=torch, cuda=cuda, python=python, system=system)
    base, base_has_python = base_of(choice, base, has_python=base_has_python)
    # Before a registry is asked.
    notes = [] if pins is None else [*image_recipe.check_pins(pins, choice)]
    found = find_base(base, environ=environ, plain_http=plain_http)
    if pins is None:
        pins, said = resolve(choice, extra, environ)
        notes += [*said, *image_recipe.check_pins(pins, choice)]
    recipe = Recipe(
        name=name,
        choice=choice,
        base=found,
        pins=tuple(pins),
        system_packages=tuple(system_packages),
        base_has_python=base_has_python,
    )
    if found.kind == "sif":
        notes.append("no Dockerfile: docker cannot start from a SIF")
    return replace(written(recipe, folder, force=force), notes=tuple(notes))


def _table(path: Path | None) -> compat.Compat:
    place = path or compat.PACKAGED
    return compat.parse(toml_files.read(place, error=SpecError), origin=str(place))


def _choice(
    known: compat.Compat,
    pins: Sequence[Pin] | None,
    *,
    torch: str | None,
    cuda: str | None,
    python: str | None,
    system: str,
) -> Choice:
    """Return what is asked for; what is not said comes from the lock, else it is the newest that fits."""
    if pins is not None:
        torch, cuda = torch or image_recipe.torch_of_pins(pins), cuda or image_recipe.cuda_of_pins(pins)
    torch = torch or _newest(known, python or _system_python(system))
    return image_recipe.choose(known, torch=torch, cuda=cuda, python=python, system=system)


def base_of(choice: Choice, base: str | None, *, has_python: bool) -> tuple[str, bool]:
    """Return what a recipe starts from, and whether that brings the Python.

    Args:
        base: as asked for; None for the distribution's official image.
        has_python: whether the user said that it does.

    Raises:
        SpecError: nobody knows that `base` brings a Python that the distribution has not.
    """
    if base is None:
        return image_recipe.default_base(choice), not choice.own_python
    if not choice.own_python and not has_python:
        raise SpecError(
            f"{choice.system.name} has Python {choice.system.python}, not {choice.python}",
            why="whether the base brings another one cannot be seen from here",
            hint=f"--python {choice.system.python}, or --base-python if `{base}` has Python {choice.python}",
        )
    return base, has_python


def written(recipe: Recipe, folder: Path, *, more: Mapping[str, str] | None = None, force: bool = False) -> InitResult:
    """Write a recipe's files; all of them, or none where something is in the way.

    Args:
        more: other files, name -> text.

    Raises:
        WouldOverwrite: a file that hpcenv did not write is there.
    """
    files = {**image_recipe.render(recipe), **(more or {})}
    _refuse_overwriting(folder, files, force=force)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        wire.write_text(text, folder / name)
    choice, base = recipe.choice, recipe.base
    return InitResult(
        folder=folder,
        image=f"{recipe.name}:{choice.tag}",
        torch=choice.torch,
        cuda=choice.cuda,
        python=choice.python,
        os=choice.system.name,
        base=f"{base.reference}{':' + base.tag if base.tag else ''}@{base.digest}",
        files=tuple(folder / name for name in sorted(files)),
        packages=len(recipe.pins),
    )


def _refuse_overwriting(folder: Path, names: Mapping[str, str], *, force: bool) -> None:
    for name in sorted(names):
        path = folder / name
        if not os.path.lexists(path):
            continue
        if not path.is_file() or path.is_symlink():
            raise WouldOverwrite(f"`{path}` is not a plain file", hint="choose another folder with --out")
        if not force and not image_recipe.is_ours(path.read_text(encoding="utf-8", errors="replace")[:200]):
            raise WouldOverwrite(
                f"`{path}` is there",
                why="it was not written by `hpcenv image init`",
                hint="choose another folder with --out, or --force",
            )


def _system_python(system: str) -> str:
    found = image_recipe.SYSTEMS.get(system)
    return found.python if found else "3.11"


def _newest(known: compat.Compat, python: str) -> str:
    suggestions = compat.suggest_torch(known, "", python=python)
    return suggestions[0].torch if suggestions else known.torches[0].version


# -- the base -------------------------------------------------------------------------------------------------------


def find_base(base: str, *, environ: Mapping[str, str], plain_http: Sequence[str] = ()) -> Base:
    """Return a base with its digest: as given, or as the registry says now.

    Args:
        environ: the user's environment, for credentials.
        plain_http: registries that are spoken to without TLS.

    Raises:
        SpecError: it is neither an image reference nor a SIF.
        ImageUnavailable: it has no digest and its registry cannot be asked.
        EnvironmentUnreadable: a SIF that cannot be read.
    """
    if base.endswith(".sif"):
        from hpcenv.adapters import sif

        path = os.path.abspath(base)
        sif.read_header(path)
        return Base(reference=path, digest=f"sha256:{sif.file_sha256(path)}", kind="sif")
    asked = registry.parse_reference(base if "://" in base else f"docker://{base}")
    # Docker and Apptainer take a name without host for one of Docker Hub.
    name = f"{asked.registry}/{asked.repository}"
    if asked.digest is not None:
        return Base(reference=name, tag=asked.tag or "", digest=asked.digest)
    try:
        image = registry.resolve(str(asked), plain_http=asked.registry in plain_http, environ=environ)
    except HpcenvError as error:
        if error.code != "image-unavailable":
            raise
        error.hint = (
            f"{error.hint or ''}\n      or name its digest, then nobody is asked: --base {base}@sha256:...".strip()
        )
        raise
    return Base(reference=name, tag=asked.tag or "", digest=image.index_digest or image.manifest_digest)


# -- the packages ---------------------------------------------------------------------------------------------------


def pins_of(lock: Path, python: str) -> tuple[Pin, ...]:
    """Return the packages of a pylock.toml, uv.lock or requirements file, for Linux on x86_64.

    Raises:
        FileUnusable: it cannot be read.
        LockfileInvalid: it holds what cannot be pinned by hash.
    """
    facts = {"python.version": f"{python}.0", "system.machine": "x86_64", "python.implementation": "cpython"}
    found = []
    for pin in read_pins(lock, environment=marker_environment(facts)):
        if not pin.required:
            continue
        if pin.version is None:
            raise LockfileInvalid(
                f"`{lock}` does not pin {pin.name} to a file",
                why=f"{pin.source}: a folder, a repository or a range has no sha256",
                hint="build a wheel of it, and lock that",
            )
        # pip compares sha256 only here: what it may install shall have one.
        hashes = tuple(one for one in pin.hashes if one.startswith("sha256:"))
        found.append(Pin(name=pin.name, version=pin.version, hashes=hashes, files=pin.filenames))
    if not found:
        raise LockfileInvalid(f"`{lock}` pins no package for Python {python}")
    return tuple(found)


def resolve(
    choice: Choice, extra: Sequence[str], environ: Mapping[str, str]
) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """Ask pip's index, as the user configured it, for wheels of torch and what it needs.

    pip only resolves (`--dry-run`); its report names every file with its sha256.

    Raises:
        ToolFailed: pip found none; its own words are not shown where they hold credentials.
        SpecError: a requirement that is none.
    """
    requirements = [choice.requirement, *map(_requirement, extra)]
    with tempfile.TemporaryDirectory(prefix="hpcenv-") as scratch:
        report = Path(scratch) / "report.json"
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-input"]
        argv += ["--disable-pip-version-check", "--only-binary", ":all:", "--target", f"{scratch}/target"]
        argv += ["--python-version", choice.python, "--implementation", "cp", "--report", str(report)]
        for platform in image_recipe.platforms(choice.system):
            argv += ["--platform", platform]
        try:
            process.run([*argv, *requirements], timeout=_RESOLVE_SECONDS, env=environ, cwd=Path(scratch))
        except ToolFailed as error:
            raise ToolFailed(
                f"pip found no wheels of {choice.requirement} and what it needs",
                status=error.status,
                why=_without_credentials(error.stderr)[-1500:],
                hint=_how_to_lock(choice),
            ) from None
        pins = _pins_of_report(report)
    notes = ["the packages were resolved now, by pip, from its index: commit requirements.lock"]
    if choice.python != f"{sys.version_info[0]}.{sys.version_info[1]}":
        notes.append(
            f"pip judges markers for the Python it runs on, not for {choice.python}: "
            "give a lock with --pylock where that matters"
        )
    return pins, tuple(notes)


def _how_to_lock(choice: Choice) -> str:
    local = choice.requirement.partition("+")[2]
    elsewhere = f"; builds `+{local}` lie on an index of their own, which pip has to be told" if local else ""
    return f"check `pip config list`{elsewhere},\n      or give a lock that you have: --pylock FILE"


def _requirement(text: str) -> str:
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        found = Requirement(text)
    except InvalidRequirement as error:
        raise SpecError(f"`{text[:100]}` is not a requirement", why=str(error).splitlines()[0]) from error
    if found.url is not None:
        raise SpecError(f"`{text[:100]}` is a URL", why="an image's packages come from pip's index, by hash")
    return str(found)


def _without_credentials(text: str) -> str:
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def _pins_of_report(path: Path) -> tuple[Pin, ...]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_pin_of(entry) for entry in report["install"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolFailed("pip's report cannot be read", why=f"{type(error).__name__}: {error}") from error


def _pin_of(entry: Mapping[str, Any]) -> Pin:
    about, info = entry["metadata"], entry["download_info"]
    filename = str(info["url"]).rsplit("/", 1)[-1].partition("#")[0].replace("%2B", "+").replace("%2b", "+")
    digest = info["archive_info"]["hashes"]["sha256"]
    return Pin(name=str(about["name"]), version=str(about["version"]), hashes=(f"sha256:{digest}",), files=(filename,))
