"""`hpcenv image rebuild`: make an image again from its lockfile, after the original is lost.

Runs on: LOGIN NODE (`--build` needs Apptainer).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcenv.errors import Command, RebuildDiffers, SpecError, ToolFailed, WouldOverwrite
from hpcenv.image import reference as references
from hpcenv.image.convert import apptainer_build, temporary_folder
from hpcenv.locking import lock as lock_step
from hpcenv.node.check import facts
from hpcenv.node.container import runtime
from hpcenv.project import lockfile as lock_model
from hpcenv.project.lockfile import Lockfile
from hpcenv.project.spec import DEFAULT_LOCK
from hpcenv.project.workspace import find_lockfile, read_lockfile
from hpcenv.recipes import image_recipe, rebuild_comparison
from hpcenv.recipes.combination import DISTRIBUTIONS, Combination, Distribution, one_of
from hpcenv.recipes.image_recipe import BaseImage, ImageRecipe
from hpcenv.recipes.init import find_base, write
from hpcenv.recipes.pip_resolution import find_installer
from hpcenv.recipes.rebuild_comparison import ComparedField, Part, RebuildPlan
from hpcenv.records.manifest import Bind, Environment

_BUILD_SECONDS = 7200.0
# Bytes of temporary space for the unpacked image, the downloads of pip, and the squashfs. torch alone has 1.2 GB of
# files without CUDA.
_ROOM_CPU, _ROOM_CUDA = 3 << 30, apptainer_build.CUDA_BYTES


@dataclass(frozen=True, kw_only=True)
class RebuildResult:
    """The files of the recipe, and the new image.

    Attributes:
        parts: what to expect of each part of the locked image.
        sif: the new image, None when it was not built.
        rows: the new image compared with the lockfile; empty when it was not built.
        notes: sentences for the user.
    """

    folder: Path
    image: str
    base: str
    files: tuple[Path, ...]
    parts: tuple[Part, ...]
    sif: Path | None = None
    rows: tuple[ComparedField, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def problem(self) -> RebuildDiffers | None:
        """An error for the fields that must be as locked, are not, and were not announced; None without such fields."""
        return problem_of(self.rows)


def problem_of(rows: Sequence[ComparedField]) -> RebuildDiffers | None:
    """Return an error for the fields that must be as locked, are not, and were not announced; None without such."""
    bad = [row for row in rows if row.severity == "must" and row.outcome != "same" and not row.announced]
    if not bad:
        return None
    return RebuildDiffers(
        f"{len(bad)} fields of the new image must be as locked and are not",
        why="\n".join(f"{row.field}: locked {row.locked[:100]}, found {row.found[:100]}" for row in bad[:10]),
        hint="lock the new image if that is acceptable; its results may differ",
    )


def rebuild(
    start: Path,
    folder: Path,
    *,
    environ: Mapping[str, str],
    lock: str = DEFAULT_LOCK,
    tag: str = "rebuilt",
    distribution: str | None = None,
    base: str | None = None,
    base_has_python: bool = False,
    proved_only: bool = False,
    plain_http: Sequence[str] = (),
    build: bool = False,
    pip_config: Path | None = None,
    on_line: Callable[[str], None] = lambda _: None,
    force: bool = False,
) -> RebuildResult:
    """Write a recipe from a lockfile; on request, build the image and compare it with the lockfile.

    Args:
        start: a folder in the project.
        folder: the folder for the files of the recipe.
        environ: the user's environment.
        lock: the name of one of the project's lockfiles, or the path of any (it ends with `.lock.toml`).
        tag: the image's name, `NAME` or `NAME:TAG`.
        distribution: its name; None for the locked one.
        base: the image to start from; None for the official image of the distribution.
        base_has_python: the base contains the Python, so apt installs none.
        proved_only: leave out packages whose wheel is not known by hash.
        plain_http: registries that are contacted without TLS.
        build: make the SIF with Apptainer and compare it with the lockfile.
        pip_config: folder with the site's pip.conf, apt.sources and so on; None for `site` in `folder`.
        on_line: called with each line of Apptainer's output.
        force: replace files that hpcenv did not write.

    Returns:
        The files, what to expect, and the comparison.

    Raises:
        SpecError: hpcenv has no recipe for the locked distribution.
        LockfileMissing, LockfileInvalid, LockfileNewer: the lockfile cannot be read.
        ImageUnavailable: the base cannot be resolved.
        WouldOverwrite: a file exists that hpcenv did not write.
        ToolMissing, ToolFailed: Apptainer is not installed, or failed.
        EnvironmentUnreadable: the facts of the new image cannot be read.
    """
    locked, plan = _plan(find_lockfile(start, lock), distribution, proved_only=proved_only)
    base, base_has_python = _base(plan.combination, base, has_python=base_has_python)
    recipe = _recipe(plan, tag, find_base(base, environ=environ, plain_http=plain_http), has_python=base_has_python)
    if not base_has_python:
        recipe = dataclasses.replace(recipe, installer=find_installer(plan.combination, environ))
    written = write(recipe, folder, more={"REBUILD.md": rebuild_comparison.report(plan, locked)}, force=force)
    result = RebuildResult(
        folder=folder,
        image=written.image,
        base=written.base,
        files=written.files,
        parts=plan.parts,
        notes=_notes(locked),
    )
    if not build:
        return result
    image, need = folder / recipe.sif, _ROOM_CPU if plan.combination.cuda == "cpu" else _ROOM_CUDA
    site = pip_config or folder / "site"
    build_sif(image, folder, pip_config=site, environ=environ, plain_http=plain_http, on_line=on_line, need=need)
    return dataclasses.replace(result, sif=image, rows=compare(locked, plan, image, environ))


def _plan(
    lockfile: Path, distribution: str | None, *, proved_only: bool
) -> tuple[Lockfile, rebuild_comparison.RebuildPlan]:
    """Return a lockfile, and what can be installed again of it."""
    locked = read_lockfile(lockfile)
    plan = rebuild_comparison.plan(locked, _distribution(locked, distribution), proved_only=proved_only)
    if not plan.pins and not plan.unproved:
        raise SpecError(
            f"`{lockfile}` names no package that can be installed again",
            hint=("run ", Command("hpcenv", "lock"), " where the environment exists"),
        )
    return locked, plan


def _base(combination: Combination, base: str | None, *, has_python: bool) -> tuple[str, bool]:
    """Return the image to start from, and whether it contains the Python."""
    if base is not None:
        return base, has_python
    distribution = combination.distribution
    if not combination.has_distribution_python and not distribution.python_image:
        raise SpecError(
            f"{distribution.name} has Python {distribution.python}, and Python {combination.python} is locked",
            hint="give an image with that Python: --base IMAGE --base-python",
        )
    return combination.default_base, not combination.has_distribution_python


def _recipe(plan: RebuildPlan, tag: str, base: BaseImage, *, has_python: bool) -> ImageRecipe:
    name, _, version = tag.partition(":")
    return ImageRecipe(
        name=name,
        tag=version,
        combination=plan.combination,
        base=base,
        pins=plan.pins,
        unproved=plan.unproved,
        base_has_python=has_python,
        environment=plan.environment,
        remark="Made again from a lockfile; REBUILD.md says what is the same and what is not.",
        verb="rebuild",
    )


def _distribution(locked: Lockfile, requested: str | None) -> Distribution:
    name = requested or rebuild_comparison.distribution_of(locked)
    distribution = DISTRIBUTIONS.get(name) if name is not None else None
    if distribution is None:
        release = str(locked.facts.get("system.os-release", "unknown"))[:60]
        raise SpecError(
            f"hpcenv has no recipe for the distribution `{(requested or release)[:60]}`",
            why=f"the locked distribution is {release}",
            hint=one_of("--os", DISTRIBUTIONS),
        )
    return distribution


def _notes(locked: Lockfile) -> tuple[str, ...]:
    if locked.container is None:
        return ()
    packages = "the packages of the overlay are installed into the new image, too: it replaces both"
    overlay = () if locked.container.overlay is None else (packages,)
    if locked.container.manifest_digest is None:
        return overlay
    reference = locked.container.reference.partition("@")[0]
    return (*overlay, f"if the original still exists: hpcenv image pull {reference}@{locked.container.manifest_digest}")


def build_sif(
    image: Path,
    folder: Path,
    *,
    pip_config: Path,
    environ: Mapping[str, str],
    plain_http: Sequence[str] = (),
    on_line: Callable[[str], None] = lambda _: None,
    need: int = _ROOM_CPU,
) -> None:
    """Build a recipe's SIF with Apptainer, as the calling user.

    Args:
        image: path of the SIF; an existing file is not replaced.
        folder: folder of the recipe, with `image.def`.
        pip_config: folder that is mounted at /mnt during the build, read-only; it need not exist.
        environ: the user's environment.
        plain_http: registries that are contacted without TLS.
        on_line: called with each line of Apptainer's output.
        need: bytes of temporary space, roughly.

    Raises:
        WouldOverwrite: `image` exists.
        HpcenvError: as `apptainer_build.build_definition`.
    """
    if os.path.lexists(image):
        raise WouldOverwrite(f"`{image}` exists", hint="move it away, or choose another folder with --output")
    recipe, unfinished = folder / "image.def", image.with_name(f".{image.name}.part")
    bind = Bind(source=os.path.abspath(pip_config), target=image_recipe.SITE, read_only=True)
    try:
        apptainer_build.build_definition(
            apptainer=runtime.find_builder(environ.get("PATH")),
            text=recipe.read_text(encoding="utf-8"),
            folder=folder,
            architecture=references.parse_platform(f"linux/{os.uname().machine}").architecture,
            destination=unfinished,
            temporary=temporary_folder.choose_temporary(temporary_folder.candidates(environ), need),
            plain_http=bool(plain_http),
            binds=(bind,) if pip_config.is_dir() else (),
            on_line=on_line,
            environ=environ,
            timeout=_BUILD_SECONDS,
        )
        os.replace(unfinished, image)
    except ToolFailed as error:
        site = f"if pip and apt need your site's configuration, put pip.conf and apt.sources into `{pip_config}`"
        raise error.changed(hint=(*error.hint_parts, "\n", site)) from error
    finally:
        unfinished.unlink(missing_ok=True)


def compare_with(lockfile: Path, image: Path, environ: Mapping[str, str]) -> tuple[ComparedField, ...]:
    """Compare a SIF that `rebuild` has made before with the lockfile that it was made from, field by field.

    Raises:
        HpcenvError: as `rebuild`.
    """
    locked, plan = _plan(lockfile, None, proved_only=False)
    return compare(locked, plan, image, environ)


def compare(locked: Lockfile, plan: RebuildPlan, image: Path, environ: Mapping[str, str]) -> tuple[ComparedField, ...]:
    """Read the facts of a SIF and compare them with a lockfile, field by field.

    Raises:
        EnvironmentUnreadable: the facts cannot be read.
    """
    environment = Environment(
        kind="sif", python="python3", sif=str(image), apptainer=runtime.find(environ.get("PATH")), gpus=False
    )
    answer = lock_step.probe(environment, environ, level="full")
    packages = facts.compare_packages(lock_model.package_expectations(locked), answer, level="full")
    inside = facts.read_answer(answer)
    differences = [(one.field, str(one.locked), str(one.found)) for one in packages]
    return rebuild_comparison.compare(locked, plan, inside.values, inside.unknown, differences)
