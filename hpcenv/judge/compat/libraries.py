"""Judge whether the libraries and packages around torch fit torch. Pure; standard library only.

Runs on: LOGIN NODE, COMPUTE NODE.

cuDNN, NCCL and cuBLAS are compared with the versions in the metadata of torch's wheel, because torch was built for
these versions and tested with them. The wheels of torchvision and torchaudio require a torch version. This version is
compared with the installed torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpcenv.judge.compat.compat_table import Compat, Pair
from hpcenv.judge.compat.judgement import Judgement
from hpcenv.judge.compat.versions import fits, minor, numbers, public, sort_key

# Each library has the field `compat.NAME`.
LIBRARIES = ("cudnn", "nccl", "cublas")
PAIRS = ("torchvision", "torchaudio")

_WORDS = {"cudnn": "cuDNN", "nccl": "NCCL", "cublas": "cuBLAS"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """A library or package that must fit torch.

    Attributes:
        field: the field for the library, for example `compat.cudnn`.
        wanted: the version that fits.
        found: the installed version.
        patch_only: whether torch has the right minor release, but a different patch release.
    """

    field: str
    wanted: str
    found: str
    judgement: Judgement
    patch_only: bool = False


def judge_environment(compat: Compat, *, torch: str, cuda: str, versions: Mapping[str, str]) -> tuple[Fit, ...]:
    """Judge all installed libraries and packages around torch.

    Args:
        compat: the table.
        torch: version of torch, `2.9.1` or `2.9.1+cu128`.
        cuda: CUDA version that torch was built for, `12.8`.
        versions: name -> version, for names in `LIBRARIES` and `PAIRS`. A missing name is not compared.
    """
    if compat.torch(torch) is None:
        judged = Judgement(result="unknown", what=compat.missing(f"torch {torch}"), why=_NOT_JUDGED)
        return (Fit(field="compat.torch", wanted="a release of the table", found=torch, judgement=judged),)
    fits_found = [check_library(compat, torch, cuda, name, versions[name]) for name in LIBRARIES if name in versions]
    fits_found += [check_pair(compat, name, versions[name], torch) for name in PAIRS if name in versions]
    return tuple(fits_found)


_NOT_JUDGED = "whether cuDNN, NCCL, cuBLAS, torchvision and torchaudio fit it is not known"


def check_library(compat: Compat, torch: str, cuda: str, name: str, version: str) -> Fit:
    """Say whether a library has the version that torch's wheel requires.

    Args:
        compat: the table.
        torch: version of torch.
        cuda: CUDA version that torch was built for; "" for the build on the default index.
        name: name of the library, for example `cudnn`.
        version: version of the library, either from its package (9.10.2.21) or from the library itself (9.10.2).
    """
    release, word = compat.torch(torch), _WORDS.get(name, name)
    have = numbers(version)
    if release is None:
        wanted, judged = "", Judgement(result="unknown", what=compat.missing(f"torch {torch}"))
    elif minor(cuda or release.pypi) != release.pypi:
        what = f"which {word} torch {torch} for CUDA {cuda} was built with is not in the table (dated {compat.dated})"
        wanted, judged = "", Judgement(result="unknown", what=what)
    elif name not in release.libraries:
        what = f"which {word} torch {torch} requires is not in the table (dated {compat.dated})"
        wanted, judged = "", Judgement(result="unknown", what=what)
    elif have is None:
        wanted, judged = release.libraries[name], Judgement(result="unknown", what=f"`{version}` is no {word} version")
    else:
        wanted = release.libraries[name]
        same = fits(have, wanted, known=len(have))
        what = f"torch {release.version} requires {word} {wanted}" + ("" if same else f", here is {version}")
        hint = "" if same else f"install the one that torch requires ({wanted})"
        judged = Judgement(result="match" if same else "mismatch", what=what, why=release.source, hint=hint)
    return Fit(field=f"compat.{name}", wanted=wanted or "unknown", found=version, judgement=judged)


def check_pair(compat: Compat, name: str, version: str, torch: str) -> Fit:
    """Say whether a package that is made for one version of torch fits the installed torch.

    Args:
        compat: the table.
        name: `torchvision` or `torchaudio`.
        version: version of the package.
        torch: version of torch.
    """
    pair, have = compat.pairs.get(name), numbers(public(torch))
    requirement = "" if pair is None else pair.torch.get(public(version), "")
    patch_only = False
    if pair is None or not requirement:
        judged = Judgement(result="unknown", what=compat.missing(f"{name} {version}"))
    elif have is None or compat.torch(torch) is None:
        judged = Judgement(result="unknown", what=compat.missing(f"torch {torch}"))
    elif not fits(have, requirement):
        patch_only = any(minor(part.lstrip("=<>~")) == minor(torch) for part in requirement.split(","))
        what = f"{name} {version} requires torch {requirement}, here is {torch}"
        judged = Judgement(result="mismatch", what=what, why=pair.source, hint=_right_one(pair, torch))
    else:
        judged = _without_doubt(pair, version, torch, requirement)
    wanted = f"torch {requirement}" if requirement else "unknown"
    return Fit(field=f"compat.{name}", wanted=wanted, found=version, judgement=judged, patch_only=patch_only)


def _doubt(pair: Pair, version: str, torch: str) -> str | None:
    """Return why it is doubtful that a version runs with this torch; None if there is no doubt."""
    when, why = pair.doubt.get(public(version), ("", ""))
    return why if when and fits(numbers(public(torch)) or (), when) else None


def _without_doubt(pair: Pair, version: str, torch: str, requirement: str) -> Judgement:
    why = _doubt(pair, version, torch)
    if why is not None:
        return Judgement(
            result="unknown", what=f"whether {pair.name} {version} runs with torch {torch} is not known", why=why
        )
    what = f"{pair.name} {version} is made for torch {requirement}"
    return Judgement(result="match", what=what, why=pair.source)


def _right_one(pair: Pair, torch: str) -> str:
    right = _fitting(pair, torch)
    return f"{pair.name} {right} fits torch {torch}" if right else ""


def _fitting(pair: Pair, torch: str) -> str | None:
    have = numbers(public(torch)) or ()
    right = [
        version
        for version, requirement in pair.torch.items()
        if fits(have, requirement) and _doubt(pair, version, torch) is None
    ]
    return max(right, key=sort_key) if right else None


def fitting_pairs(compat: Compat, torch: str) -> dict[str, str]:
    """Return the newest torchvision and torchaudio that fit a torch.

    A package is left out if no version in the table fits. A version with an entry in `doubt` does not fit.
    """
    found = {name: _fitting(pair, torch) for name, pair in compat.pairs.items()}
    return {name: version for name, version in found.items() if version is not None}


def library_of(package: str) -> str:
    """Return the name in `LIBRARIES` or `PAIRS` for a package, for example `cudnn` for `nvidia-cudnn-cu12`; else ""."""
    name = re.sub(r"[-_.]+", "-", package).lower()
    match = re.fullmatch(r"nvidia-([a-z]+)(?:-cu\d+)?", name)
    known = match[1] if match else name
    return known if known in (LIBRARIES if match else PAIRS) else ""
