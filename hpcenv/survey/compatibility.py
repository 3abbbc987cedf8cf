"""`hpcenv compat`: which versions of torch, CUDA, driver, GPU and Python run together. No cluster is needed.

Runs on: LOGIN NODE. `ask` is pure: it makes an answer from the compatibility table and a question.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hpcenv.errors import UsageError
from hpcenv.judge.compat.compat_table import Compat, GpuModel, TorchRelease
from hpcenv.judge.compat.drivers import check_driver
from hpcenv.judge.compat.floors import driver_floor
from hpcenv.judge.compat.gpu_names import gpu_by_name
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.kernels import covers
from hpcenv.judge.compat.libraries import PAIRS, check_library, check_pair, library_of
from hpcenv.judge.compat.toolkits import check_driver_branch, check_toolkit
from hpcenv.judge.compat.torch_builds import (
    AARCH64,
    X86_64,
    builds_for,
    check_python,
    default_cuda,
    python_range,
    triton_note,
)
from hpcenv.judge.compat.versions import minor, numbers, public, sort_key
from hpcenv.project import compatibility
from hpcenv.records.verdict import Result
from hpcenv.text import Shown

Part = Literal["torch", "build", "python", "driver", "gpu", "package"]
MACHINES = (X86_64, AARCH64)


@dataclass(frozen=True, kw_only=True)
class CompatQuestion:
    """A question about versions that should run together. Empty parts are ignored.

    Attributes:
        gpu: name of the GPU as NVIDIA or Slurm writes it, for example `A100`.
        driver: version of the driver, for example `535.183.06`.
        torch: torch release, also with a build (`2.7.1+cu118`). `2.7` means the newest patch release of 2.7.
        cuda: CUDA release of the torch build or of a program, for example `12.6`.
        python: version of Python, for example `3.13`, or `3.13t` for free-threaded Python.
        machine: processor architecture; "" for the architecture that belongs to the GPU, or else x86_64.
        packages: name and version of further packages.
        cuda_compat: CUDA release of a cuda-compat package that is first on the loader's path.
    """

    gpu: str = ""
    driver: str = ""
    torch: str = ""
    cuda: str = ""
    python: str = ""
    machine: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    cuda_compat: str = ""


@dataclass(frozen=True, kw_only=True)
class CompatCheck:
    """One comparison.

    Attributes:
        what: the result in a sentence.
        why: the reason, with its source.
        hint: what would work instead.
    """

    part: Part
    result: Result
    what: str
    why: str = ""
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class BuildAnswer:
    """The answer whether one torch build runs with the versions in the question.

    Attributes:
        cuda: CUDA release of the build; `cpu` for a build without CUDA.
        python: the first and the last Python version for which there are wheels.
        default: whether the default index has this build.
        what: why the build does not run, or what is not known; empty if the build runs.
        hint: what would make the build run.
    """

    torch: str
    cuda: str
    python: str
    default: bool
    result: Result
    what: str = ""
    hint: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True, repr=False)
class Answer(Shown):
    """The answer to a question.

    Attributes:
        dated: when the oldest part of the table was read from its source.
        table: the file of the table.
        checks: the comparisons that were possible.
        builds: torch builds, the newest first. If the question names a torch release, all builds of this release;
            otherwise one build of each minor release.
        notes: for example the age of the table, and how a part of the question was understood.
    """

    result: Result
    question: CompatQuestion
    dated: str
    table: str
    checks: tuple[CompatCheck, ...]
    builds: tuple[BuildAnswer, ...]
    notes: tuple[str, ...] = ()


def compat(
    *,
    gpu: str = "",
    driver: str = "",
    torch: str = "",
    cuda: str = "",
    python: str = "",
    machine: str = "",
    packages: Sequence[str] = (),
    cuda_compat: str = "",
    today: dt.date | None = None,
) -> Answer:
    """Return which versions run together, from hpcenv's table (`hpcenv compat`). No cluster is needed.

    Args:
        gpu, driver, torch, cuda, python, machine, cuda_compat: as in `CompatQuestion`; empty values are ignored.
        packages: further packages, each as NAME==VERSION (`--with`).
        today: today's date, for a note on the age of the table; None for no note.

    Raises:
        UsageError: the question contradicts itself, or a part of it is not a version.
    """
    question = CompatQuestion(
        gpu=gpu, driver=driver, torch=torch, cuda=cuda, python=python, machine=machine,
        packages=tuple(version_of(text) for text in packages), cuda_compat=cuda_compat,
    )  # fmt: skip
    return ask(compatibility.table(), question, today=today)


def ask(compat: Compat, question: CompatQuestion, *, today: dt.date | None) -> Answer:
    """Answer a question about versions that should run together.

    Args:
        compat: the compatibility table.
        question: the question.
        today: today's date, for a note on the age of the table; None for no note.

    Raises:
        UsageError: the question contradicts itself, or a part of it is not a version.
    """
    asked, release, notes = _read(compat, question)
    age = "" if today is None else compat.age_note(today)
    if release is not None and is_open(question):
        notes.append(f"nothing was compared with torch {release.version}: add --gpu, --driver or --python")
    gpu = gpu_by_name(compat, asked.gpu) if asked.gpu else None
    machine = asked.machine or (gpu.machine if gpu is not None and gpu.machine else X86_64)
    asked = replace(asked, machine=machine)
    # If the torch release or the GPU is not in the table, nothing is known about any build.
    is_known = (release is not None or not asked.torch) and (gpu is not None or not asked.gpu)
    if release is not None:
        checks = [*_about_versions(compat, asked, gpu), *_about_build(compat, asked, release, gpu)]
        builds = tuple(_build(compat, asked, release, cuda, gpu) for cuda in _cudas(release, asked) if is_known)
        triton = triton_note(release, asked.python) if asked.python else ""
        notes += [triton] if triton else []
    else:
        checks = [*_about_versions(compat, asked, gpu), *_without_torch(compat, asked, gpu)]
        builds = tuple(_of_each_minor(compat, asked, gpu)) if is_known else ()
        if not checks and not builds:
            what = f"no torch of the table is built for CUDA {asked.cuda}"
            checks.append(CompatCheck(part="build", result="unknown", what=what, hint="add --driver, or --gpu"))
    return Answer(
        result=_overall(checks, builds),
        question=asked,
        dated=compat.dated,
        table=compat.origin,
        checks=tuple(checks),
        builds=builds,
        notes=tuple(note for note in (age, *notes) if note),
    )


def is_open(question: CompatQuestion) -> bool:
    """Return whether the question has no part that can be compared with torch releases."""
    return question == CompatQuestion(torch=question.torch)


def _overall(checks: list[CompatCheck], builds: tuple[BuildAnswer, ...]) -> Result:
    """Return the worst result of the checks. Without checks, return `match` if any build runs."""
    results = {check.result for check in checks}
    if not results:
        results = {"match"} if any(build.result == "match" for build in builds) else {b.result for b in builds}
    if "mismatch" in results:
        return "mismatch"
    return "unknown" if "unknown" in results or not results else "match"


# -- the question -------------------------------------------------------------------------


def _read(compat: Compat, question: CompatQuestion) -> tuple[CompatQuestion, TorchRelease | None, list[str]]:
    """Return the question with exact versions, the torch release (None if the table lacks it), and notes."""
    if question.machine and question.machine not in MACHINES:
        raise UsageError(
            f"`{question.machine}` is no architecture of the table", hint=f"--machine {' or '.join(MACHINES)}"
        )
    _require_versions(question)
    version, _, build = question.torch.partition("+")
    cuda = _cuda_of(build, question)
    notes = []
    if question.driver.isdigit():
        first = f"driver {question.driver} is read as the first one of its branch"
        notes.append(f"{first}; exact is the whole version, as nvidia-smi shows it")
    release = compat.torch(version)
    if release is None and re.fullmatch(r"\d+\.\d+", version):
        release = next((one for one in compat.torches if minor(one.version) == version), None)
        notes += [f"torch {version} is read as {release.version}, its newest patch release"] if release else []
    torch = version if release is None else release.version
    return replace(question, torch=torch, cuda=cuda), release, notes


# The form of each version, and an example. Free-threaded Python is written 3.13t.
_FORMS = {
    "driver": (r"\d{3,4}(\.\d+){0,2}", "535.183.06"),
    "torch": (r"\d+(\.\d+)*[\w.+-]*", "2.9.1"),
    "cuda": (r"\d+\.\d+(\.\d+)?|cpu", "12.6"),
    "python": (r"\d\.\d+(\.\d+)?t?", "3.13"),
    "cuda_compat": (r"\d+\.\d+", "12.8"),
}


def _require_versions(question: CompatQuestion) -> None:
    """Refuse a value that is not a version, because the table has no answer for it."""
    for part, (form, example) in _FORMS.items():
        value = getattr(question, part)
        if value and not re.fullmatch(form, value):
            option = f"--{part.replace('_', '-')}"
            raise UsageError(f"`{value[:60]}` is no version for {option}", hint=f"for example: {option} {example}")


def _cuda_of(build: str, question: CompatQuestion) -> str:
    """Return the CUDA release of a build such as `cu118`. Without a build, return the CUDA release in the question."""
    match = re.fullmatch(r"cu(\d+)(\d)", build)
    cuda = f"{match[1]}.{match[2]}" if match else build
    if build and not match and build != "cpu":
        raise UsageError(f"`+{build}` is no build of torch for CUDA", hint="for example: --torch 2.7.1+cu118")
    if cuda and question.cuda and minor(question.cuda) != cuda:
        raise UsageError(
            f"torch {question.torch} is built for CUDA {cuda}, and the question says CUDA {question.cuda}",
            hint="leave out one of the two",
        )
    return cuda or question.cuda


def _about_versions(compat: Compat, asked: CompatQuestion, gpu: GpuModel | None) -> Iterator[CompatCheck]:
    """Yield an `unknown` check for each part of the question that is not in the table."""
    if asked.torch and compat.torch(asked.torch) is None:
        yield CompatCheck(part="torch", result="unknown", what=compat.missing(f"torch {asked.torch}"), hint=_RENEW)
    if asked.gpu and gpu is None:
        amd = re.search("(?i)instinct|mi[0-9]{2,3}", asked.gpu)
        hint = "the table has no GPUs of AMD" if amd else "name it as NVIDIA does, for example `RTX A6000`"
        yield CompatCheck(part="gpu", result="unknown", what=compat.missing(f"the GPU `{asked.gpu}`"), hint=hint)
    if asked.cuda not in ("", "cpu") and not compat.knows_toolkit(asked.cuda):
        yield CompatCheck(part="build", result="unknown", what=compat.missing(f"CUDA {asked.cuda}"), hint=_RENEW)
    branch = (numbers(asked.driver) or (0,))[0]
    if branch > compat.newest_branch:
        what = compat.missing(f"driver branch {branch}")
        why = f"its newest branch is {compat.newest_branch}; a newer driver runs older CUDA if it supports the GPU"
        yield CompatCheck(part="driver", result="unknown", what=what, why=why, hint=_RENEW)


_RENEW = "renew the table: scripts/renew-compat --help"


# -- one torch build ----------------------------------------------------------------------


def _about_build(
    compat: Compat, asked: CompatQuestion, release: TorchRelease, gpu: GpuModel | None
) -> Iterator[CompatCheck]:
    """Yield the checks of one build: of the build in the question, or else of the build on the default index."""
    cuda = asked.cuda or default_cuda(release, asked.machine)
    builds = builds_for(release, asked.machine)
    if asked.python:
        yield _check("python", check_python(compat, release, asked.python, machine=asked.machine))
    for name, version in asked.packages:
        yield _check("package", _judge_package(compat, asked, name, version))
    if asked.cuda == "cpu" or not (asked.cuda or asked.driver or asked.gpu):
        return
    missing = _missing_build(release, cuda, asked.machine)
    if missing is not None:
        yield _check("build", missing)
        return
    if asked.driver:
        yield _check("driver", _judge_driver(compat, asked, cuda, gpu))
    if gpu is not None:
        kernels = builds[minor(cuda)]
        yield _check("gpu", _judge_kernels(compat, asked, release, cuda, kernels, gpu))


def _missing_build(release: TorchRelease, cuda: str, machine: str) -> Judgement | None:
    """Return why a build for this CUDA release does not exist; None if the build exists.

    If `cuda` is `cpu`, the build on the default index has no CUDA.
    """
    builds = builds_for(release, machine)
    if minor(cuda) in builds:
        return None
    if cuda == "cpu":
        what = f"torch {release.version} on the default index is built for CPUs on {machine}"
        labels = [f"{release.version}+cu{one.replace('.', '')}" for one in builds]
        hint = f"PyTorch's own index has it for CUDA: --torch {' or '.join(labels)}" if labels else ""
        return Judgement(result="mismatch", what=what, why=release.source, hint=hint)
    kept = ", ".join(builds) or "none"
    what = f"the table has no build of torch {release.version} for CUDA {cuda} on {machine}; it has {kept}"
    # If the table has only one build of a release, the release may have further builds.
    certain = len(builds) != 1
    return Judgement(result="mismatch" if certain else "unknown", what=what, why=release.source)


def _sourced(judged: Judgement, source: str) -> Judgement:
    """Return the judgement with its source added to the reason, if the reason does not name a source yet."""
    known = "read 20" in judged.why or judged.result == "unknown"
    return judged if known else replace(judged, why="; ".join(part for part in (judged.why, source) if part))


def _judge_driver(compat: Compat, asked: CompatQuestion, cuda: str, gpu: GpuModel | None) -> Judgement:
    judged = check_driver(
        compat,
        cuda,
        asked.driver,
        holder="",
        forward_compat=asked.cuda_compat or None,
        gpus=(asked.gpu,) if asked.gpu else (),
        compute_capability="" if gpu is None else gpu.compute_capability,
        machine=asked.machine,
    )
    return _sourced(judged, compat.floors_source)


def _judge_kernels(
    compat: Compat, asked: CompatQuestion, release: TorchRelease, cuda: str, kernels: tuple[str, ...], gpu: GpuModel
) -> Judgement:
    subject = f"torch {release.version} for CUDA {minor(cuda)}"
    if not kernels:
        what = f"which GPUs {subject} has kernels for is not in the table (dated {compat.dated})"
        return Judgement(result="unknown", what=what, why=release.source)
    judged = covers(
        compat, kernels, gpu.compute_capability, gpu=gpu.name, cuda=cuda, driver=asked.driver, machine=asked.machine,
        subject=subject,
    )  # fmt: skip
    return _sourced(judged, release.source)


def _judge_package(compat: Compat, asked: CompatQuestion, name: str, version: str) -> Judgement:
    jax = _jax_cuda(name)
    if jax:
        return _judge_jax(compat, asked, f"{name} {version}", jax)
    known = library_of(name)
    if not known:
        return Judgement(result="unknown", what=compat.missing(f"the package {name}"))
    if known in PAIRS:
        return check_pair(compat, known, version, asked.torch).judgement
    return check_library(compat, asked.torch, asked.cuda, known, version).judgement


def _jax_cuda(name: str) -> str:
    """Return the CUDA release of JAX's plug-in: `13` for `jax-cuda13-plugin` and for `jax[cuda13]`; else empty."""
    match = re.fullmatch(r"jax-cuda(\d+)-plugin|jax\[cuda(\d+)(?:-local)?\]", re.sub(r"[-_.]+", "-", name).lower())
    return (match[1] or match[2]) if match else ""


def _judge_jax(compat: Compat, asked: CompatQuestion, package: str, cuda: str) -> Judgement:
    """Return whether JAX's plug-in works with driver and GPU of the question. It compiles kernels when it runs."""
    gpu = gpu_by_name(compat, asked.gpu) if asked.gpu else None
    judged = []
    if asked.driver:
        judged.append(_judge_driver(compat, asked, cuda, gpu))
    if gpu is not None:
        judged.append(check_toolkit(compat, cuda, gpu.compute_capability, gpu=gpu.name))
    if not judged:
        floor = driver_floor(compat, cuda)
        what = f"{package} is for CUDA {cuda}, which needs driver >= {floor.version}" if floor else package
        return Judgement(result="unknown", what=what, why=compat.floors_source, hint="say which: --driver VERSION")
    worst = min(judged, key=lambda one: ("mismatch", "unknown", "match").index(one.result))
    # The hint is left out, because it is about builds of torch.
    return replace(worst, what=f"{package}: {worst.what}", hint="")


def _check(part: Part, judged: Judgement) -> CompatCheck:
    return CompatCheck(part=part, result=judged.result, what=judged.what, why=judged.why, hint=judged.hint)


# -- without a torch release ----------------------------------------------------------------


def _without_torch(compat: Compat, asked: CompatQuestion, gpu: GpuModel | None) -> Iterator[CompatCheck]:
    """Yield the checks that need only driver, CUDA and GPU."""
    for name, version in asked.packages:
        if _jax_cuda(name):
            yield _check("package", _judge_package(compat, asked, name, version))
            continue
        what = f"whether {name} {version} fits depends on torch"
        yield CompatCheck(part="package", result="unknown", what=what, hint="say which: --torch VERSION")
    cuda = "" if asked.cuda == "cpu" else asked.cuda
    if asked.driver and cuda:
        yield _check("driver", _judge_driver(compat, asked, cuda, gpu))
    elif asked.driver and gpu is not None:
        yield _check("driver", check_driver_branch(compat, asked.driver, gpu.compute_capability, gpu=gpu.name))
    if gpu is not None and cuda:
        yield _check("gpu", check_toolkit(compat, cuda, gpu.compute_capability, gpu=gpu.name))


# -- the list of builds ---------------------------------------------------------------------


def _cudas(release: TorchRelease, asked: CompatQuestion) -> list[str]:
    """Return the CUDA version of every build of a release, the build on the default index first."""
    cudas = sorted(builds_for(release, asked.machine), key=sort_key, reverse=True)
    return sorted(cudas, key=lambda cuda: cuda != default_cuda(release, asked.machine)) or ["cpu"]


def _of_each_minor(compat: Compat, asked: CompatQuestion, gpu: GpuModel | None) -> Iterator[BuildAnswer]:
    """For each minor release, yield the best build of the newest patch release."""
    seen = set()
    order: list[Result] = ["match", "unknown", "mismatch"]
    for release in compat.torches:
        if minor(release.version) in seen:
            continue
        seen.add(minor(release.version))
        cudas = [cuda for cuda in _cudas(release, asked) if not asked.cuda or cuda == minor(asked.cuda)]
        found = [_build(compat, asked, release, cuda, gpu) for cuda in cudas]
        if found:
            yield min(found, key=lambda build: order.index(build.result))


def _build(
    compat: Compat, asked: CompatQuestion, release: TorchRelease, cuda: str, gpu: GpuModel | None
) -> BuildAnswer:
    """Return the answer whether a build runs with the driver, GPU and Python of the question."""
    only = replace(asked, torch=release.version, cuda="" if cuda == "cpu" else cuda, packages=())
    checks = list(_about_build(compat, only, release, gpu))
    if cuda == "cpu" and not checks:
        result: Result = "unknown" if asked.gpu or asked.driver else "match"
        what = f"built for CPUs on {asked.machine}"
    else:
        result, what = _overall(checks, ()) if checks else "match", ""
    bad = next((check for check in checks if check.result == result != "match"), None)
    return BuildAnswer(
        torch=release.version,
        cuda=cuda,
        python="-".join(python_range(release, asked.machine)),
        default=cuda in (default_cuda(release, asked.machine), "cpu"),
        result=result,
        what=bad.what if bad is not None else what,
        hint=_lifted(compat, only, cuda, bad, gpu),
        source=bad.why if bad is not None else release.source,
    )


def _lifted(compat: Compat, asked: CompatQuestion, cuda: str, bad: CompatCheck | None, gpu: GpuModel | None) -> str:
    """Return a hint that names the cuda-compat package with which an old driver can run a build; empty without one."""
    if bad is None or bad.part != "driver" or asked.cuda_compat:
        return ""
    packages = [package for package in compat.forward.package if sort_key(package) >= sort_key(cuda)]
    for package in sorted(packages, key=sort_key):
        if _judge_driver(compat, replace(asked, cuda_compat=package), cuda, gpu).result == "match":
            return f"runs with cuda-compat-{package.replace('.', '-')} first on the loader's path"
    return ""


def version_of(text: str) -> tuple[str, str]:
    """Return name and version of `NAME==VERSION`.

    Raises:
        UsageError: the text has a different form.
    """
    name, sign, version = text.partition("==")
    if not sign or not name.strip() or numbers(public(version.strip())) is None:
        raise UsageError(f"`{text}` is not NAME==VERSION", hint="for example: --with torchvision==0.24.1")
    return name.strip(), version.strip()
