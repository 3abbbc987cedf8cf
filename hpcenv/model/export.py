"""A lockfile in the words of other tools: pip, conda, CycloneDX. Pure.

Runs on: LOGIN NODE.

    requirements  NAME==VERSION --hash=sha256:... for every package whose wheel is proved
    pylock        PEP 751, every such wheel with the URL that an index gives it today
    environment   conda's environment.yml: Python, and the pins for its pip
    cyclonedx     CycloneDX 1.6 (ECMA-424): packages, image, SIF and libraries with their digests

What a format cannot hold is left out with its reason, which stands in the text and in `left_out`.
The same lockfile gives the same bytes: no time, no place, no version of hpcenv.

A lockfile is untrusted input, and its words become lines that pip and conda obey: a name, version, hash or URL
that does not have the strict form of one is never written but in a comment, as ASCII without line ends.

pylock.toml has `wheels` only, for wheels of a direct URL too: `archive` would be the form for these, but the file is
the same, hash included. URLs of files (`file:`, `path`) are refused: they would make whoever installs read from a
place that somebody else chose. So are URLs with a query, which may hold a secret; a user and password are cut off.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote, urlsplit, urlunsplit

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hpcenv.model import document
from hpcenv.model import lockfile as lock_model
from hpcenv.model.lockfile import ContainerTable, DistTable, Lockfile

if TYPE_CHECKING:
    from cyclonedx.model import HashType, Property
    from cyclonedx.model.component import Component
    from packageurl import PackageURL

Format = Literal["pylock", "requirements", "cyclonedx", "environment"]
FORMATS: tuple[Format, ...] = ("pylock", "requirements", "cyclonedx", "environment")

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,254}[A-Za-z0-9])?")
_VERSION = re.compile(r"[!-~]{1,200}")
_HEX_SHA256 = re.compile(r"[0-9a-f]{64}")
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]_-]+/[A-Za-z0-9._~%!$&'()*+,;=:@/-]{1,1900}")
_WORD = re.compile(r"[A-Za-z0-9_.-]{1,60}")

# Written by other means than an index: what pip would fetch by name and version is something else.
_NO_INDEX = {
    "editable": "editable install",
    "vcs": "installed from version control",
    "directory": "installed from a directory",
    "archive": "installed from an archive",
    "conda": "installed by conda",
    "dpkg": "installed by dpkg",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A package that is not in the export, and why."""

    name: str
    version: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendered:
    """An export's text.

    Attributes:
        count: packages that it pins or lists.
        notes: what its reader has to know.
    """

    text: str
    count: int
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Pylock:
    """A pylock.toml as plain data, ready for a TOML writer; `header` is its leading comment."""

    header: str
    data: dict[str, Any]
    left_out: tuple[LeftOut, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelLink:
    """A wheel as an index or a folder lists it.

    Attributes:
        url: None for a file of this machine.
        sha256: as the index states it, None when it does not.
    """

    filename: str
    url: str | None
    sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WheelUrl:
    """Where a locked wheel is to be had: a URL, perhaps with a remark, or why there is none."""

    url: str | None = None
    remark: str = ""
    reason: str = ""


# -- requirements.txt ---------------------------------------------------------------------------------------------


def requirements(lockfile: Lockfile) -> Rendered:
    """Render what `pip install --no-deps --require-hashes -r FILE` installs."""
    lines = [*_header("requirements", lockfile), "# pip install --no-deps --require-hashes -r FILE"]
    left_out: list[LeftOut] = []
    pinned = []
    for dist, problem in _judged(lockfile, _why_no_wheel):
        if problem:
            left_out.append(_left_out(dist, problem))
            lines.append(_comment(dist, problem))
            continue
        if _is_modified(dist):
            lines.append(_comment(dist, _MODIFIED))
        lines.append(f"{_pin(dist)} --hash=sha256:{_sha256(dist)}")
        pinned.append(dist)
    notes = (*_summary(lockfile, left_out), *_about_indexes(pinned), *_about_modified(pinned))
    return Rendered(text="\n".join(lines) + "\n", count=len(pinned), left_out=tuple(left_out), notes=notes)


# -- pylock.toml --------------------------------------------------------------------------------------------------


def wheels_to_find(lockfile: Lockfile) -> tuple[DistTable, ...]:
    """Return the packages that only an index can give a URL for."""
    proved = (dist for dist, problem in _judged(lockfile, _why_no_wheel) if not problem)
    return tuple(dist for dist in proved if _direct_url(dist) is None)


def choose_url(dist: DistTable, links: Sequence[WheelLink]) -> WheelUrl:
    """Return the URL of a locked wheel: of a file that the index says has the locked sha256.

    An index that states no sha256 is believed by file name: pip compares the file with the locked one.
    """
    sha256, filename = _sha256(dist), dist.wheel.filename if dist.wheel else None
    same = [link for link in links if link.sha256 == sha256]
    named = [link for link in links if link.filename == filename and link.sha256 is None]
    for link in (*same, *named):
        url, problem = _public(link.url) if link.url is not None else (None, "")
        if url is not None:
            remark = "" if link.sha256 else "the index states no sha256 for it; pip compares it with the locked one"
            return WheelUrl(url=url, remark=remark)
        if problem:
            return WheelUrl(reason=problem)
    if same or named:
        return WheelUrl(reason="its wheel lies in a folder of this machine (find-links), and no index has it")
    other = [link.sha256 for link in links if link.filename == filename and link.sha256]
    if other:
        return WheelUrl(reason=f"the index has another file of that name: sha256 {other[0]}, locked {sha256}")
    return WheelUrl(reason=f"no index lists {filename or 'its wheel'}")


def pylock(lockfile: Lockfile, urls: Mapping[str, WheelUrl]) -> Pylock:
    """Render PEP 751 data.

    Args:
        urls: of every package of `wheels_to_find`, by name.
    """
    header = _header("pylock", lockfile)
    left_out: list[LeftOut] = []
    pinned: list[DistTable] = []
    packages = []
    remarks = []
    for dist, unproved in _judged(lockfile, _why_no_wheel):
        direct = None if unproved else _direct_url(dist)
        found = WheelUrl(url=direct) if direct else urls.get(dist.name, WheelUrl(reason="its URL was not looked up"))
        filename = _wheel_name(dist, found.url) if found.url else None
        problem = unproved or found.reason or "its wheel has not the name of a wheel of this name and version"
        if unproved or found.url is None or filename is None:
            left_out.append(_left_out(dist, problem))
            header.append(_comment(dist, problem))
            continue
        if _is_modified(dist):
            header.append(_comment(dist, _MODIFIED))
        if found.remark:
            remarks.append(f"{dist.name}: {found.remark}")
        packages.append(_package(dist, found.url, filename))
        pinned.append(dist)
    data = {"lock-version": "1.0", **_fits(lockfile), "created-by": "hpcenv", "packages": packages}
    return Pylock(
        header="\n".join(line.removeprefix("# ") for line in header),
        data=data,
        left_out=tuple(left_out),
        notes=(*_summary(lockfile, left_out), *_about_modified(pinned), *remarks),
    )


def _package(dist: DistTable, url: str, filename: str) -> dict[str, Any]:
    wheel = {"name": filename, "url": url, "hashes": {"sha256": _sha256(dist)}}
    return {"name": canonicalize_name(dist.name), "version": dist.version, "wheels": [wheel]}


def _wheel_name(dist: DistTable, url: str) -> str | None:
    """Return the wheel's file name, None when an installer would not take it for this package."""
    own = dist.wheel.filename if dist.wheel else None
    filename = own or unquote(urlsplit(url).path.rsplit("/", 1)[-1])
    try:
        name, version, _, _ = parse_wheel_filename(filename)
    except (InvalidWheelFilename, InvalidVersion):
        return None
    fits = (name, version) == (canonicalize_name(dist.name), Version(dist.version))
    return filename if fits and _VERSION.fullmatch(filename) else None


def _fits(lockfile: Lockfile) -> dict[str, Any]:
    """Return which Python and machine the wheels are for: an installer refuses any other."""
    found: dict[str, Any] = {}
    parts = ["sys_platform == 'linux'"]
    for marker, field in (("platform_machine", "system.machine"), ("implementation_name", "python.implementation")):
        value = str(lockfile.facts.get(field, ""))
        if _WORD.fullmatch(value):
            parts.append(f"{marker} == '{value}'")
    release = re.match(r"3\.\d{1,3}(?!\d)", _python_version(lockfile) or "")
    if release:
        parts.append(f"python_version == '{release[0]}'")
    found["environments"] = [" and ".join(parts)]
    if release:
        found["requires-python"] = f"=={release[0]}.*"
    return found


def _public(url: str) -> tuple[str | None, str]:
    """Return a URL that can be handed to others, or why it cannot."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):
        return None, f"its URL is of the kind `{parts.scheme}:`, which names a place on one machine"
    if parts.query:
        return None, "its URL holds a query, which may be a secret"
    plain = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return (plain, "") if _URL.fullmatch(plain) else (None, "its URL has characters that a URL may not have")


# -- environment.yml ----------------------------------------------------------------------------------------------


def environment(lockfile: Lockfile, *, name: str) -> Rendered:
    """Render conda's environment.yml. Channels are the user's: an environment of pip needs none."""
    lines = _header("environment", lockfile)
    left_out: list[LeftOut] = []
    pinned = []
    pins = []
    for dist, problem in _judged(lockfile, _why_no_pin):
        if problem:
            left_out.append(_left_out(dist, problem))
            lines.append(_comment(dist, problem))
            continue
        if _is_modified(dist):
            lines.append(_comment(dist, _MODIFIED))
        pin = _pin(dist)
        direct = " @ " in pin
        # JSON's string is one of YAML's: only there may `#` stand within.
        pins.append("      - " + (json.dumps(f"{pin}#sha256={_sha256(dist)}") if direct else pin))
        pinned.append(dist)
    lines += [f"name: {json.dumps(name)}", "dependencies:"]
    notes = [*_summary(lockfile, left_out), *_about_indexes(pinned), *_about_modified(pinned)]
    python, implementation = _python_version(lockfile), lockfile.facts.get("python.implementation", "cpython")
    if python and implementation == "cpython":
        lines.append(f"  - python={python}")
    else:
        lines.append("  - python")
        notes.append(f"the Python is not pinned: locked is {_plain(f'{implementation} {python}')}")
    lines.append("  - pip")
    if pins:
        lines += ["  - pip:", *pins]
    return Rendered(text="\n".join(lines) + "\n", count=len(pins), left_out=tuple(left_out), notes=tuple(notes))


# -- CycloneDX ----------------------------------------------------------------------------------------------------


def cyclonedx(lockfile: Lockfile) -> Rendered:
    """Render a CycloneDX 1.6 BOM as JSON.

    The environment is the component that it describes; its version is the fingerprint, and so is what the serial
    number is made of. Everything is listed, also what has no hash: nothing is left out here.
    """
    from uuid import NAMESPACE_URL, uuid5

    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6

    root = Component(
        type=ComponentType.APPLICATION,
        name="hpcenv-environment",
        version=_cut(lockfile.fingerprint),
        bom_ref="environment",
        properties=_properties(_root_facts(lockfile)),
    )
    components = [*_image_components(lockfile.container), *_library_components(lockfile), *_dist_components(lockfile)]
    python = _python_version(lockfile)
    if python is not None:
        components.append(_python_component(lockfile, python))
    bom = Bom(
        serial_number=uuid5(NAMESPACE_URL, f"hpcenv:{lockfile.fingerprint}"),
        components=components,
    )
    # CycloneDX does not require one, the library's types do: the same lockfile shall give the same bytes.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    bom.metadata.component = root
    bom.metadata.tools.components.add(Component(type=ComponentType.APPLICATION, name="hpcenv"))
    bom.register_dependency(root, components)
    text = JsonV1Dot6(bom).output_as_string(indent=2)
    return Rendered(text=text.rstrip("\n") + "\n", count=len(lockfile.packages.dist), notes=_about_edited(lockfile))


def _root_facts(lockfile: Lockfile) -> dict[str, object]:
    """Return what is of no single component: torch's build, system, what is asked of a host, what is unknown."""
    packages = document.plain(lockfile.packages, "dist")
    return {
        **{field: value for field, value in lockfile.facts.items() if not _library_of(field)},
        **{f"packages.{key}": value for key, value in packages.items()},
        "host.driver-min": lockfile.host.driver_min,
        "determinism.profile": lockfile.determinism.profile,
        **{f"unknown:{field}": reason for field, reason in lockfile.unknown.items()},
    }


def _image_components(container: ContainerTable | None) -> Iterator[Component]:
    """The image with its identity chain, and the SIF that the nodes run."""
    from cyclonedx.model.component import Component, ComponentType

    if container is None:
        return
    chain = document.plain(container, "sif", "layers", "nvidia")
    yield Component(
        type=ComponentType.CONTAINER,
        name=_repository(container.reference)[0],
        version=_cut(container.digest),
        bom_ref="image",
        purl=_oci(container),
        hashes=_hashes(container.digest.removeprefix("sha256:")),
        properties=_properties(
            {
                **{f"container.{key}": value for key, value in chain.items()},
                **{f"container.layer.{n}.diff-id": layer.diff_id for n, layer in enumerate(container.layers)},
                **{f"container.nvidia.{key}": value for key, value in container.nvidia.items()},
            }
        ),
    )
    sif = document.plain(container.sif, "sha256")
    yield Component(
        type=ComponentType.FILE,
        name=f"{container.digest.replace(':', '-')}.sif",
        bom_ref="sif",
        hashes=_hashes(container.sif.sha256),
        properties=_properties({f"container.sif.{key}": value for key, value in sif.items()}),
    )


def _oci(container: ContainerTable) -> PackageURL | None:
    from packageurl import PackageURL

    if not container.reference.startswith("docker://"):
        return None  # a file has no registry to ask
    repository, tag = _repository(container.reference)
    name = repository.rsplit("/", 1)[-1].lower()
    if not _NAME.fullmatch(name) or not _VERSION.fullmatch(container.digest):
        return None
    words = {"repository_url": repository, "tag": tag, "arch": container.platform.partition("/")[2]}
    return PackageURL(
        type="oci",
        name=name,
        version=container.digest,
        qualifiers={key: value for key, value in words.items() if value},
    )


def _repository(reference: str) -> tuple[str, str]:
    """Split `docker://HOST/NAME:TAG@DIGEST` into `HOST/NAME` and the tag; files have no tag."""
    if not reference.startswith("docker://"):
        return reference, ""
    place = reference.rpartition("://")[2].partition("@")[0]
    head, _, last = place.rpartition("/")
    name, _, tag = last.partition(":")
    return (f"{head}/{name}" if head else name), tag


_LIBRARY = re.compile(r"libs\.([^.]+)\.(.+)")


def _library_of(field: str) -> str | None:
    found = _LIBRARY.fullmatch(field)
    return found[1] if found else None


def _library_components(lockfile: Lockfile) -> Iterator[Component]:
    """The libraries that really load: CUDA runtime, cuBLAS, cuDNN, NCCL and so on."""
    from cyclonedx.model.component import Component, ComponentType

    libraries: dict[str, dict[str, object]] = {}
    for field, value in lockfile.facts.items():
        found = _LIBRARY.fullmatch(field)
        if found and value != "absent":
            libraries.setdefault(found[1], {})[found[2]] = value
    for name, facts in sorted(libraries.items()):
        version = facts.get("version")
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=_cut(version) if isinstance(version, str) else None,
            bom_ref=f"library:{name}",
            hashes=_hashes(str(facts.get("sha256", "")).removeprefix("sha256:")),
            properties=_properties({f"libs.{name}.{key}": value for key, value in facts.items()}),
        )


def _python_component(lockfile: Lockfile, version: str) -> Component:
    from cyclonedx.model.component import Component, ComponentType
    from packageurl import PackageURL

    name = str(lockfile.facts.get("python.implementation", "python"))
    purl = PackageURL(type="generic", name=name, version=version) if _NAME.fullmatch(name) else None
    return Component(type=ComponentType.PLATFORM, name=name, version=_cut(version), bom_ref="python", purl=purl)


def _dist_components(lockfile: Lockfile) -> Iterator[Component]:
    from cyclonedx.model.component import Component, ComponentType

    seen: Counter[str] = Counter()
    for dist in _sorted(lockfile):
        reference = f"package:{dist.name}@{dist.version}"
        seen[reference] += 1
        yield Component(
            type=ComponentType.LIBRARY,
            name=dist.name,
            version=_cut(dist.version),
            bom_ref=reference if seen[reference] == 1 else f"{reference}#{seen[reference]}",
            purl=_purl(dist),
            hashes=_hashes(_sha256(dist) or ""),
            properties=_properties(_dist_facts(dist)),
        )


def _dist_facts(dist: DistTable) -> dict[str, object]:
    direct = document.plain(dist.direct_url) if dist.direct_url else {}
    wheel = document.plain(dist.wheel, "sha256") if dist.wheel else {}
    return {
        "source": dist.source,
        "record-sha256": dist.record_sha256,
        "content-sha256": dist.content_sha256,
        "reason": dist.reason,
        **{f"direct-url.{key}": value for key, value in direct.items()},
        # A package whose wheel was not looked for has none that is proved.
        **{f"wheel.{key}": value for key, value in (wheel or {"proof": "none"}).items()},
    }


def _purl(dist: DistTable) -> PackageURL | None:
    """Return a package URL; one of PyPI only for what an index could have given."""
    from packageurl import PackageURL

    if not _NAME.fullmatch(dist.name) or not _VERSION.fullmatch(dist.version):
        return None
    proved = _sha256(dist) is not None
    if dist.source in _NO_INDEX and not proved:
        kind = "conda" if dist.source == "conda" else "generic"
        return PackageURL(type=kind, name=dist.name, version=dist.version)
    filename = dist.wheel.filename if dist.wheel and proved else None
    return PackageURL(
        type="pypi",
        name=canonicalize_name(dist.name),
        version=dist.version,
        qualifiers={"file_name": filename} if filename else None,
    )


def _cut(version: str) -> str:
    """CycloneDX 1.6 allows 1024 characters."""
    return version[:1024]


def _properties(facts: Mapping[str, object]) -> list[Property]:
    from cyclonedx.model import Property

    return [
        Property(name=f"hpcenv:{key}", value=_word(value)) for key, value in sorted(facts.items()) if value is not None
    ]


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _hashes(sha256: str) -> list[HashType]:
    from cyclonedx.model import HashAlgorithm, HashType

    return [HashType(alg=HashAlgorithm.SHA_256, content=sha256)] if _HEX_SHA256.fullmatch(sha256) else []


# -- what a package is to pip -------------------------------------------------------------------------------------

_MODIFIED = "modified after it was installed: this gives it as it was before"


def _sorted(lockfile: Lockfile) -> list[DistTable]:
    """Return the packages in one order, whoever wrote the lockfile."""
    return sorted(lockfile.packages.dist, key=lambda dist: (canonicalize_name(dist.name), dist.version, str(dist)))


def _judged(lockfile: Lockfile, judge: Any) -> Iterator[tuple[DistTable, str]]:
    """Yield every package in order, with why it cannot be pinned; "" when it can."""
    count = Counter(canonicalize_name(dist.name) for dist in lockfile.packages.dist)
    for dist in _sorted(lockfile):
        times = count[canonicalize_name(dist.name)]
        yield dist, judge(dist) if times == 1 else f"it is installed {times} times, and pip installs it once"


def _why_no_pin(dist: DistTable) -> str:
    """Say why name and version do not lead pip to this package, "" when they do."""
    if not _NAME.fullmatch(dist.name):
        return "its name is none that pip takes"
    try:
        Version(dist.version)
    except InvalidVersion:
        return "its version is none that pip takes (PEP 440)"
    if not dist.version.isascii() or dist.version.strip() != dist.version:
        return "its version is none that pip takes (PEP 440)"
    if dist.source in _NO_INDEX and _sha256(dist) is None:
        return _origin(dist)
    return ""


def _why_no_wheel(dist: DistTable) -> str:
    """Say why there is no hash that pip could require, "" when there is one."""
    problem = _why_no_pin(dist)
    if problem or _sha256(dist) is not None:
        return problem
    if dist.wheel is None:
        return "the lockfile names no wheel of it; `hpcenv lock` looks for one"
    return dist.wheel.reason or "its wheel has no proof"


def _origin(dist: DistTable) -> str:
    """Say where a package came from that is of no index."""
    text = _NO_INDEX[str(dist.source)]
    direct = dist.direct_url
    if direct is not None:
        text += f" {direct.url}" if direct.url else ""
        text += f" at {direct.commit_id}" if direct.commit_id else ""
        text += ", with changes that are not committed" if direct.dirty else ""
    return text


def _sha256(dist: DistTable) -> str | None:
    """Return the wheel's sha256 where it is proved."""
    wheel = dist.wheel
    if wheel is None or wheel.proof == "none" or wheel.sha256 is None or not _HEX_SHA256.fullmatch(wheel.sha256):
        return None
    return wheel.sha256


def _direct_url(dist: DistTable) -> str | None:
    """Return the URL that a wheel was installed from, when it can be had from there."""
    direct = dist.direct_url
    if direct is None or not direct.url or _sha256(dist) is None or not direct.url.endswith(".whl"):
        return None
    return _public(direct.url)[0]


def _pin(dist: DistTable) -> str:
    direct = _direct_url(dist)
    return f"{dist.name}=={dist.version}" if direct is None else f"{dist.name} @ {direct}"


def _is_modified(dist: DistTable) -> bool:
    return dist.content_sha256 is not None and dist.record_sha256 is not None


def _python_version(lockfile: Lockfile) -> str | None:
    version = lockfile.facts.get("python.version")
    return version if isinstance(version, str) and re.fullmatch(r"\d+(\.\d+){1,2}((a|b|rc)\d+)?", version) else None


# -- comments and notes -------------------------------------------------------------------------------------------


def first_line(kind: Format) -> str:
    """Return how the first line of a text export of ours begins."""
    return f"# Written by `hpcenv export {kind}`"


def is_ours(kind: Format, text: str) -> bool:
    """Say whether a file is an export of this kind that hpcenv wrote, so that it may be replaced."""
    if kind != "cyclonedx":
        return text.startswith(first_line(kind))
    try:
        found = json.loads(text)
        return bool(
            found["bomFormat"] == "CycloneDX" and found["metadata"]["component"]["name"] == "hpcenv-environment"
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _header(kind: Format, lockfile: Lockfile) -> list[str]:
    python = _plain(f"{lockfile.facts.get('python.implementation', '')} {lockfile.facts['python.version']}")
    lines = [
        f"{first_line(kind)} from the lockfile {_plain(lockfile.fingerprint)}; do not edit.",
        f"# For {python} on {_plain(lockfile.asked.platform)}.",
    ]
    if lockfile.container is not None:
        digest = _plain(lockfile.container.digest)
        lines.append(f"# Locked in the image {_plain(lockfile.container.reference)}, {digest}, which is not in here.")
    return lines


def _comment(dist: DistTable, text: str) -> str:
    return f"# {_plain(dist.name)}=={_plain(dist.version)}: {_plain(text)}"


def _plain(text: str) -> str:
    """Return untrusted words as ASCII on one line, and not too many."""
    line = " ".join(text.split()).encode("ascii", "backslashreplace").decode()
    return "".join(char if char.isprintable() else "?" for char in line)[:400]


def _left_out(dist: DistTable, reason: str) -> LeftOut:
    return LeftOut(name=_plain(dist.name), version=_plain(dist.version), reason=_plain(reason))


def _summary(lockfile: Lockfile, left_out: Sequence[LeftOut]) -> tuple[str, ...]:
    notes = [*_about_edited(lockfile)]
    if left_out:
        names = ", ".join(one.name for one in left_out[:5]) + (", ..." if len(left_out) > 5 else "")
        notes.append(f"{len(left_out)} of {len(lockfile.packages.dist)} packages are left out: {names}")
    if lockfile.packages.unlisted_count:
        notes.append(f"{lockfile.packages.unlisted_count} files that belong to no package are not in it")
    if lockfile.container is not None:
        notes.append("the image is not in it: only its Python packages are")
    return tuple(notes)


def _about_edited(lockfile: Lockfile) -> tuple[str, ...]:
    content = lock_model.fingerprint(lock_model.to_data(lockfile))
    # Of a newer revision only a part is known here.
    if lockfile.revision > lock_model.REVISION or content == lockfile.fingerprint:
        return ()
    return (f"the lockfile was edited: it says {_plain(lockfile.fingerprint)}, its content is {content}",)


def _about_indexes(pinned: Sequence[DistTable]) -> tuple[str, ...]:
    """Say which packages the default index may not have."""
    found: dict[str, list[str]] = {}
    for dist in pinned:
        if dist.wheel is not None and dist.wheel.index not in (None, "pypi"):
            found.setdefault(_plain(str(dist.wheel.index)), []).append(dist.name)
        elif dist.direct_url is not None and _direct_url(dist) is None:
            found.setdefault("a file", []).append(dist.name)
    return tuple(
        f"pip must be configured to find {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}: "
        f"installed from {place}"
        for place, names in sorted(found.items())
    )


def _about_modified(pinned: Sequence[DistTable]) -> tuple[str, ...]:
    return tuple(f"{dist.name} {dist.version} was {_MODIFIED}" for dist in pinned if _is_modified(dist))
