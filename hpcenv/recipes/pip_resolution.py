"""Find wheels and source archives with their sha256 on the index that the user configured for pip.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from hpcenv import process
from hpcenv.errors import SpecError, ToolFailed
from hpcenv.locking.wheels.pip_request import ask_for_sources
from hpcenv.locking.wheels.proof import HEX_SHA256, Index
from hpcenv.recipes.combination import Combination, platforms
from hpcenv.recipes.pinned_packages import PinnedPackage

# If an index has no PEP 658 metadata, pip downloads whole wheels, for example of torch.
_RESOLVE_SECONDS = 1800.0
_LIST_SECONDS = 60.0


def find_wheels(
    requirements: Sequence[str],
    combination: Combination,
    environ: Mapping[str, str],
    *,
    otherwise: str,
    constraints: Sequence[PinnedPackage] = (),
    limits: Sequence[str] = (),
) -> tuple[PinnedPackage, ...]:
    """Return wheels for some requirements, and for all packages that these requirements need.

    pip installs nothing (`--dry-run`). Its report names every file, with the sha256 of the file.

    Args:
        requirements: the requirements for pip, or `--requirement=FILE`.
        combination: Python and distribution that the wheels must run on.
        environ: the user's environment, with the variables that configure pip.
        otherwise: what else the user can do if pip finds no wheels. The hint of the error ends with this text.
        constraints: packages with a version that is already decided. They are left out of the result.
        limits: requirements that a package must meet if another package needs it.

    Raises:
        ToolFailed: pip found no wheels. The error contains the end of pip's output, without credentials.
    """
    with tempfile.TemporaryDirectory(prefix="hpcenv-") as scratch:
        report, constraint_file = Path(scratch) / "report.json", Path(scratch) / "constraints.txt"
        # On another index, the wheel's version may have no local part such as +cu126. So the local part is left out.
        lines = (f"{pin.name}=={pin.version.partition('+')[0]}\n" for pin in constraints)
        constraint_file.write_text("".join((*lines, *(f"{one}\n" for one in limits))), encoding="utf-8")
        argv = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-input"]
        argv += ["--disable-pip-version-check", "--only-binary", ":all:", "--target", f"{scratch}/target"]
        argv += ["--python-version", combination.python, "--implementation", "cp", "--report", str(report)]
        argv += ["--constraint", str(constraint_file)]
        argv += ["--log", f"{scratch}/log"]
        for platform in platforms(combination.distribution):
            argv += ["--platform", platform]
        try:
            process.run([*argv, *requirements], timeout=_RESOLVE_SECONDS, env=environ, cwd=Path(scratch))
        except ToolFailed as error:
            why, hint = _cause(_log_lines(Path(scratch) / "log"), error.stderr, combination)
            raise ToolFailed(
                f"pip found no wheels of {_listed(requirements)}, and of their requirements",
                status=error.status,
                why=_without_credentials(why)[-1500:],
                hint=",\nor ".join(filter(None, (hint, otherwise))),
            ) from None
        pins = _pins_of_report(report)
    known = {canonicalize_name(pin.name) for pin in constraints}
    return tuple(pin for pin in pins if canonicalize_name(pin.name) not in known)


def find_installer(combination: Combination, environ: Mapping[str, str]) -> PinnedPackage | None:
    """Return a newer pip for a distribution whose pip is too old; None if the distribution's pip is new enough.

    Raises:
        ToolFailed: pip's index has no newer pip.
    """
    if not (combination.distribution.old_pip and combination.has_distribution_python):
        return None
    (found,) = find_wheels(("pip",), combination, environ, otherwise="")
    return found


def _listed(words: Sequence[str]) -> str:
    return " and ".join(words) if len(words) < 3 else f"{', '.join(words[:-1])} and {words[-1]}"


def _log_lines(log: Path) -> str:
    """Return pip's log without the time at the beginning of each line; empty if pip wrote no log."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "\n".join(line.partition(" ")[2] for line in text.splitlines())


def _cause(log: str, stderr: str, combination: Combination) -> tuple[str, str]:
    """Return why pip found no wheels, and what the user can do."""
    if found := re.search(r"The conflict is caused by:\n(.*?)\n\s*\n", log, re.DOTALL):
        return textwrap.dedent(found[1]), "name versions that go together, or let pip choose: --with NAME"
    # Status 404 only means that one of several indexes does not have the package.
    if found := re.search(r"Could not fetch URL (\S+: (?!404).*?)(?: - skipping)?$", log, re.MULTILINE):
        return f"pip could not reach {found[1]}", f"{_CHECK_PIP}, and try again"
    found = re.search(r"satisfies the requirement (.+?) \(from versions: ([^)]*)\)", stderr)
    if found is None:
        return stderr, "check `pip config list`"
    wanted, versions = found[1], [] if found[2] == "none" else found[2].split(", ")
    why = f"no wheel of {wanted} for Python {combination.python} on {combination.distribution.name} is on pip's index"
    name = re.split(r"[^\w.-]", wanted)[0]
    if combination.requirement == wanted and "+" in wanted:
        hint = f"builds `+{wanted.partition('+')[2]}` are on another index, which pip must be configured for"
    elif versions:
        why += f"; it has {', '.join(versions[-_SHOWN:])}"
        requiring = re.search(r"\(from (?!-)([\w.-]+)", wanted)
        hint = f"name a version that is there, or let pip choose: --with {requiring[1] if requiring else name}"
        if name == "torch":
            hint = "name a version that is there: --torch VERSION"
    else:
        hint = (
            f"check the name {name}, and `pip config list`; compile a package without wheels: --build {name}==VERSION"
        )
    return why, hint


# An error lists this many of the versions that an index has, the newest ones.
_SHOWN = 5


def _without_credentials(text: str) -> str:
    return re.sub(r"://[^/\s@]+@", "://***@", text)


def _pins_of_report(path: Path) -> tuple[PinnedPackage, ...]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return tuple(_pin_of(entry) for entry in report["install"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ToolFailed("pip's report cannot be read", why=f"{type(error).__name__}: {error}") from error


def _pin_of(entry: Mapping[str, Any]) -> PinnedPackage:
    metadata, info = entry["metadata"], entry["download_info"]
    filename = str(info["url"]).rsplit("/", 1)[-1].partition("#")[0].replace("%2B", "+").replace("%2b", "+")
    digest = info["archive_info"]["hashes"]["sha256"]
    return PinnedPackage(
        name=str(metadata["name"]), version=str(metadata["version"]), hashes=(f"sha256:{digest}",), files=(filename,)
    )


def find_sources(packages: Sequence[tuple[str, str]], environ: Mapping[str, str]) -> tuple[PinnedPackage, ...]:
    """Return the source archives of some packages, with the sha256 that the index states.

    pip's resolver is not used, because it would run the setup.py of each package here. A setup.py often needs torch and
    a compiler.

    Args:
        packages: name and version of each package.
        environ: the user's environment, with the variables that configure pip.

    Raises:
        SpecError: the index has no source archive of a package, or states no sha256 of the archive.
        ToolFailed: the index did not answer.
    """
    reply = ask_for_sources(packages, index=Index(env=environ), timeout=_LIST_SECONDS)
    if "error" in reply:
        raise ToolFailed("pip's index could not be asked for source archives", why=reply["error"], hint=_CHECK_PIP)
    return tuple(_source(*package, answer) for package, answer in zip(packages, reply["answers"], strict=True))


_CHECK_PIP = "check `pip config list` and the network"


def _source(name: str, version: str, answer: Mapping[str, Any]) -> PinnedPackage:
    found = answer["sources"]
    if not found:
        raise SpecError(
            f"no source archive of {name} {version} is on pip's index",
            why="; ".join(answer["trouble"]) or "the index lists no source archive (.tar.gz, .zip) of this version",
            hint="put a source archive into a folder, and name the folder to pip: PIP_FIND_LINKS=FOLDER",
        )
    hashes = {str(one["sha256"]) for one in found if HEX_SHA256.fullmatch(str(one["sha256"]))}
    if not hashes:
        raise SpecError(
            f"the index states no sha256 of the source archive of {name} {version}",
            why=f"without it the build could compile anything: {found[0]['filename'][:100]}",
            hint="download it into a folder, and name the folder to pip: PIP_FIND_LINKS=FOLDER",
        )
    return PinnedPackage(
        name=name,
        version=version,
        hashes=tuple(f"sha256:{one}" for one in sorted(hashes)),
        files=tuple(str(one["filename"]) for one in found),
    )
