"""`hpcenv image rebuild`: make an image again from its lockfile, when the original is gone.

Runs on: LOGIN NODE (`--build` needs Apptainer).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.adapters import apptainer, apptainer_build, references, temporary
from hpcenv.errors import PinsDiffer, SpecError, ToolFailed, WouldOverwrite
from hpcenv.model import image_rebuild, image_recipe
from hpcenv.model import lockfile as lock_model
from hpcenv.model.image_rebuild import Part, Plan, Row
from hpcenv.model.image_recipe import Base, Choice, Recipe
from hpcenv.model.lockfile import Lockfile
from hpcenv.node import facts
from hpcenv.steps import lock as lock_step
from hpcenv.steps.image.init import find_base, written
from hpcenv.steps.workspace import read_lockfile
from hpcenv.wire import Bind, Environment

_BUILD_SECONDS = 7200.0
# Bytes of temporary space for the unpacked image, what pip fetches, and the squashfs: torch alone has 1.2 GB of files
# without CUDA, and 7 GB with it.
_ROOM_CPU, _ROOM_CUDA = 3 << 30, 14 << 30


@dataclass(frozen=True, kw_only=True)
class RebuildResult:
    """What was written, and made.

    Attributes:
        parts: what to expect of each part of the locked image.
        sif: the new image, None when it was not built.
        rows: what it has, compared with the lockfile; empty when it was not built.
    """

    folder: Path
    image: str
    base: str
    files: tuple[Path, ...]
    parts: tuple[Part, ...]
    sif: Path | None = None
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def problem(self) -> PinsDiffer | None:
        """What must be the same and is not, and nobody said so before, as an error; None when nothing was built."""
        must = [row for row in self.rows if row.severity == "must" and row.outcome != "same"]
        bad = [row for row in must if not row.announced]
        if not bad:
            return None
        return PinsDiffer(
            f"{len(bad)} fields that must be as locked are not, in the image that was made again",
            why="\n".join(f"{row.field}: locked {row.locked[:100]}, found {row.found[:100]}" for row in bad[:10]),
            hint="lock the new image if that is acceptable; its results may differ",
        )


def rebuild(
    lockfile: Path,
    folder: Path,
    *,
    environ: Mapping[str, str],
    name: str = "rebuilt",
    system: str | None = None,
    base: str | None = None,
    base_has_python: bool = False,
    proved_only: bool = False,
    plain_http: Sequence[str] = (),
    build: bool = False,
    site: Path | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    force: bool = False,
) -> RebuildResult:
    """Write a recipe from a lockfile; build it and compare, if asked.

    Args:
        lockfile: its path; nothing of it is run.
        folder: where the recipe's files go.
        system: the distribution; None for the locked one.
        base: what to start from; None for the official image of that distribution.
        proved_only: leave out packages whose wheel is not known by hash.
        build: make the SIF with Apptainer and look into it.
        site: folder with the site's pip.conf and the like; None for `site` in `folder`.
        on_line: gets each line of Apptainer's output.

    Raises:
        SpecError: no recipe is known for the locked distribution.
        LockfileMissing, LockfileInvalid, LockfileNewer: it cannot be read.
        ImageUnavailable: the base cannot be resolved.
        WouldOverwrite: a file is in the way.
        ToolMissing, ToolFailed: Apptainer is not there, or failed.
        EnvironmentUnreadable: the new image cannot be looked into.
    """
    locked = read_lockfile(lockfile)
    found = _system(locked, system)
    plan = image_rebuild.plan(locked, found, proved_only=proved_only)
    if not plan.pins and not plan.unproved:
        raise SpecError(f"`{lockfile}` names no package that can be installed again", hint="hpcenv lock, where it runs")
    base, base_has_python = _base(plan.choice, found, base, has_python=base_has_python)
    recipe = _recipe(plan, name, find_base(base, environ=environ, plain_http=plain_http), has_python=base_has_python)
    files = written(recipe, folder, more={"REBUILD.md": image_rebuild.report(plan, locked)}, force=force)
    result = RebuildResult(
        folder=folder, image=files.image, base=files.base, files=files.files, parts=plan.parts, notes=_notes(locked)
    )
    if not build:
        return result
    image = folder / f"{name}_{plan.choice.tag}.sif"
    build_sif(
        image, folder, site=site or folder / "site", environ=environ, plain_http=plain_http, on_line=on_line,
        need=_ROOM_CPU if plan.choice.cuda == "cpu" else _ROOM_CUDA,
    )  # fmt: skip
    return dataclasses.replace(result, sif=image, rows=compare(locked, plan, image, environ))


def _base(choice: Choice, found: image_recipe.System, base: str | None, *, has_python: bool) -> tuple[str, bool]:
    """Return what to start from, and whether that brings the Python."""
    if base is not None:
        return base, has_python
    if not choice.own_python and not found.python_image:
        raise SpecError(f"{found.name} has Python {found.python}, locked is {choice.python}", hint="give --base")
    return image_recipe.default_base(choice), not choice.own_python


def _recipe(plan: Plan, name: str, base: Base, *, has_python: bool) -> Recipe:
    return Recipe(
        name=name,
        choice=plan.choice,
        base=base,
        pins=plan.pins,
        unproved=plan.unproved,
        base_has_python=has_python,
        environment=plan.environment,
        remarks=("Made again from a lockfile; REBUILD.md says what is the same and what is not.",),
        verb="rebuild",
    )


def _system(locked: Lockfile, asked: str | None) -> image_recipe.System:
    name = asked or image_rebuild.system_of(locked)
    found = image_rebuild.system(name) if name is not None else None
    if found is None:
        has = locked.facts.get("system.os-release", "unknown")
        raise SpecError(
            f"no recipe is known for the distribution `{str(asked or has)[:60]}`",
            why=f"locked is {str(has)[:60]}",
            hint="--os takes one of: " + ", ".join(image_recipe.SYSTEMS),
        )
    return found


def _notes(locked: Lockfile) -> tuple[str, ...]:
    if locked.container is None or locked.container.manifest_digest is None:
        return ()
    reference = locked.container.reference.partition("@")[0]
    return (f"if the original is still somewhere: hpcenv image pull {reference}@{locked.container.manifest_digest}",)


def build_sif(
    image: Path,
    folder: Path,
    *,
    site: Path,
    environ: Mapping[str, str],
    plain_http: Sequence[str] = (),
    on_line: Callable[[str], None] = lambda _: None,
    need: int = _ROOM_CPU,
) -> None:
    """Make a recipe's SIF with Apptainer, as whoever calls.

    Args:
        image: where; nothing is overwritten.
        folder: of the recipe, with its `image.def`.
        site: folder that is mounted at /mnt while it is made, read-only; it need not exist.
        need: bytes of temporary space, about.

    Raises:
        WouldOverwrite: there is something already.
        HpcenvError: as `apptainer_build.build_definition`.
    """
    if os.path.lexists(image):
        raise WouldOverwrite(f"`{image}` is there", hint="move it away, or choose another folder with --out")
    recipe, aside = folder / "image.def", image.with_name(f".{image.name}.part")
    binds = (Bind(source=os.path.abspath(site), target=image_recipe.SITE, read_only=True),) if site.is_dir() else ()
    try:
        apptainer_build.build_definition(
            apptainer=apptainer.find(environ.get("PATH")),
            text=recipe.read_text(encoding="utf-8"),
            folder=folder,
            architecture=references.parse_platform(f"linux/{os.uname().machine}")[1],
            destination=aside,
            temporary=temporary.choose_temporary(temporary.candidates(environ), need),
            plain_http=bool(plain_http),
            binds=binds,
            on_line=on_line,
            environ=environ,
            timeout=_BUILD_SECONDS,
        )
        os.replace(aside, image)
    except ToolFailed as error:
        error.hint = "pip and apt need what your site has: put pip.conf, apt.sources into the folder `site`"
        raise
    finally:
        aside.unlink(missing_ok=True)


def compare(locked: Lockfile, plan: Plan, image: Path, environ: Mapping[str, str]) -> tuple[Row, ...]:
    """Look into a SIF and compare it with a lockfile, field by field.

    Raises:
        EnvironmentUnreadable: it cannot be looked into.
    """
    environment = Environment(
        kind="sif", python="python3", sif=str(image), apptainer=apptainer.find(environ.get("PATH")), gpus=False
    )
    answer = lock_step.probe(environment, environ, level="full")
    different = facts.compare_packages(lock_model.package_expectations(locked), answer, level="full")
    inside = facts.read_answer(answer)
    rows = [(one.field, str(one.locked), str(one.found)) for one in different]
    return image_rebuild.compare(locked, plan, inside.values, inside.unknown, rows)
