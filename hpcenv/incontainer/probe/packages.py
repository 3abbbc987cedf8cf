"""Distributions: names, versions and digests.

Runs on: inside the image.
"""

from __future__ import annotations

import os

from hpcenv.incontainer.probe.environment import Dist
from hpcenv.incontainer.probe.files import read_metadata
from hpcenv.incontainer.probe.paths import list_folder
from hpcenv.incontainer.probe.hashing import digest_of_lines
from hpcenv.incontainer.probe.origin import read_origin
from hpcenv.incontainer.probe.record import read_record, record_digest
from hpcenv.incontainer.probe.text import describe_error, printable
from hpcenv.incontainer.probe.unrecorded import digest_unrecorded
from hpcenv.incontainer.probe.table import Probe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.environment import ProbedEnvironment, Site
    from hpcenv.incontainer.probe.values import Facts


# Further or longer requirements in a METADATA file are cut. The requirements are used only for a note of `hpcenv lock`.
REQUIREMENTS, REQUIREMENT_LENGTH = 300, 500


def probe_packages(env: ProbedEnvironment) -> Facts:
    """Return the number of dists and the digest over their RECORDs."""
    first: dict[str, Dist] = {}
    env.shadowed = []
    for site in env.sites:
        for folder in metadata_folders(site.path):
            dist = read_dist(env, site, folder)
            if first.setdefault(dist.name, dist) is not dist:
                env.shadowed.append(dist)
    env.dists = [first[name] for name in sorted(first)]
    digest_unrecorded(env)
    # A file counts as listed only if the env-digest covers its RECORD. The unlisted digest covers all other files.
    env.listed = {file for dist in env.dists if dist.record for file in dist.listed}
    lines = [digest_line(d, d.record) for d in env.dists]
    return {
        "packages.count": len(env.dists),
        "packages.env-digest": "sha256:" + digest_of_lines("hpcenv-env-v1", lines),
    }


def digest_line(dist: Dist, digest: str | None) -> str:
    """Return a dist's line in the env-digest (step 5)."""
    return "\0".join((dist.name, dist.version, digest or "unknown"))


def metadata_folders(path: str) -> list[str]:
    if path.endswith(".egg"):
        return [n for n in list_folder(path) if n == "EGG-INFO"]
    return sorted(n for n in list_folder(path) if n.endswith((".dist-info", ".egg-info")) and n[0] != "~")


def read_dist(env: ProbedEnvironment, site: Site, folder: str) -> Dist:
    """Return one dist. If a part of the dist cannot be read, the dist has a reason and no digest."""
    dist = Dist(site, folder)
    for part in (_read_identity, read_record, read_origin):
        try:
            part(env, dist)
        except ImportError:
            raise  # the standard library is broken, not this dist, so no dist can be read
        except Exception as error:  # noqa: BLE001 - for example csv.Error; one bad dist must not hide the others
            dist.reasons.append(part.__name__.split("_")[-1] + ": " + describe_error(error))
            if part is read_record and isinstance(error, FileNotFoundError):
                dist.no_record = dist.reasons[-1]
    dist.record = None if dist.reasons else dist.plain_digest or record_digest(dist.rows)
    return dist


def name_and_version(folder: str) -> tuple[str, str]:
    """Return name and version from the name of a metadata folder, for a distribution whose METADATA cannot be read."""
    stem = folder.rsplit(".", 1)[0].split("-")
    return _normal_name(printable(stem[0])), printable(stem[1] if len(stem) > 1 else "")


def _read_identity(env: ProbedEnvironment, dist: Dist) -> None:
    """Read name, version and installer. If METADATA cannot be read, name and version come from the folder's name."""
    info = os.path.join(dist.site.path, dist.folder)
    dist.name, dist.version = name_and_version(dist.folder)
    try:
        lines = read_metadata(env, dist, os.path.join(info, "INSTALLER"))[:200].split(b"\n")
        dist.installer = printable(lines[0].decode("utf-8", "surrogateescape").strip()) or None
    except (OSError, ValueError):
        dist.installer = None  # the installer is only information
    try:
        name = "METADATA" if dist.folder.endswith(".dist-info") else "PKG-INFO"
        data = read_metadata(env, dist, os.path.join(info, name))
    except NotADirectoryError:
        data = read_metadata(env, dist, info)  # an egg-info may be a single file
    head = _head(data)
    if env.level != "record":
        dist.requires = _requirements(data)
    if not head.get("name") or not head.get("version"):
        raise ValueError("no Name and Version in the metadata")
    if len(head["name"]) > 255 or len(head["version"]) > 255:
        raise ValueError("a name or version of more than 255 characters")
    dist.name, dist.version = _normal_name(printable(head["name"])), _normal_version(printable(head["version"]))


def _head(data: bytes) -> dict[str, str]:
    """Return the headers of METADATA. Does not use the email package, whose import takes 20 ms."""
    headers: dict[str, str] = {}
    # A description of any length may follow.
    header = data.partition(b"\n\n")[0]
    for line in header.decode("utf-8", "surrogateescape").splitlines():
        if not line.strip():
            break
        key, colon, value = line.partition(":")
        if colon and key[:1].strip():  # a line that starts with a space continues the previous line
            headers.setdefault(key.lower(), value.strip())
    return headers


def _requirements(data: bytes) -> list[str]:
    """Return the Requires-Dist lines of METADATA, without lines for extras."""
    header = data.partition(b"\n\n")[0].decode("utf-8", "surrogateescape")
    lines = [line.partition(":")[2].strip() for line in header.splitlines() if line.startswith("Requires-Dist:")]
    return [printable(line)[:REQUIREMENT_LENGTH] for line in lines if "extra ==" not in line][:REQUIREMENTS]


def _normal_name(name: str) -> str:
    import re

    return re.sub(r"[-_.]+", "-", name).lower()


def _normal_version(version: str) -> str:
    """Return a version in PEP 440's normal form; unchanged if it is not a version."""
    import re

    match = re.match(
        r"v?(?:([0-9]+)!)?([0-9]+(?:\.[0-9]+)*)"
        r"(?:[-_.]?(alpha|a|beta|b|preview|pre|c|rc)[-_.]?([0-9]*))?"
        r"(?:-([0-9]+)|[-_.]?(post|rev|r)[-_.]?([0-9]*))?"
        r"(?:[-_.]?(dev)[-_.]?([0-9]*))?"
        r"(?:\+([a-z0-9]+(?:[-_.][a-z0-9]+)*))?$",
        version.strip().lower(),
    )
    if not match:
        return version
    epoch, release, pre, pre_number, bare_post, post, post_number, dev, dev_number, local = match.groups()

    def number(digits: str | None) -> str:
        return (digits or "").lstrip("0") or "0"  # int() is not used, because it refuses numbers with very many digits

    text = number(epoch) + "!" if number(epoch) != "0" else ""
    text += ".".join(number(part) for part in release.split("."))
    if pre:
        short = {"alpha": "a", "beta": "b", "c": "rc", "pre": "rc", "preview": "rc"}
        text += short.get(pre, pre) + number(pre_number)
    if bare_post or post:
        text += ".post" + number(bare_post or post_number)
    if dev:
        text += ".dev" + number(dev_number)
    if local:
        text += "+" + ".".join(number(p) if p.isdigit() else p for p in re.split(r"[-_.]", local))
    return text


PROBES: tuple[Probe, ...] = (Probe("packages", ("packages.count", "packages.env-digest"), probe_packages),)
