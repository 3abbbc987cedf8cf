"""The lockfile: the resolved environment, and its canonical form.

Runs on: LOGIN NODE.

A lockfile of schema 1 describes the container by its digests, the SIF, Python, torch, libraries, every package with
its digest, and the system. The lockfile contains only data, never code. It contains no time, host name or path of a
machine, so the same environment gives the same bytes for every user, at any time. hpcenv refuses a newer major
`schema`. A newer `revision` may add keys (PEP 751 has the same rule for `lock-version`).

The text below a key describes the key. A key without a text has a row in the table of fields. `scripts/reference-docs`
reads these texts and that table. pydantic does not read the texts, because this would make every command slower.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from typing_extensions import Self

from hpcenv.incontainer.probe import rules
from hpcenv.judge.compat.architectures import of_build
from hpcenv.project import document, fields
from hpcenv.project import severities as severity_model
from hpcenv.project.document import Document, table_at
from hpcenv.project.fields import LEVELS, FieldLevel
from hpcenv.records.manifest import (
    DataCompare,
    DeterminismProfile,
    Expectation,
    OverlayUse,
    PackageExpectation,
    Severity,
    Value,
)
from hpcenv.records.package_fields import package_field
from hpcenv.records.severities import Severities
from hpcenv.size import gigabytes

SCHEMA = 1
REVISION = rules.REVISION
# Number of a revision -> the fields that this revision added. An older lockfile of a host environment does not have
# these fields. (For an image, the hash of the SIF covers them.)
ADDED_IN_REVISION = {
    1: (
        "python.binary-sha256",
        "python.libpython-sha256",
        "python.launcher-sha256",
        "python.variables",
        "libs.ld-audit",
        "libs.glibc-tunables",
        "libs.system",
        "libs.unlisted",
        "libs.ld-so-preload",
        "packages.conda-content-digest",
        "packages.*.programs-sha256",
    )
}


def _renew_profile(value: object) -> object:
    """Return the name of a determinism profile. In lockfiles from before 2026-11, the profile `off` is `default`."""
    return "off" if value == "default" else value


class LockTable(Document):
    """A table of the lockfile. hpcenv writes it; users do not edit it."""


class AskedTable(LockTable):
    """[asked]: the part of hpcenv.toml that this lockfile was made from.

    If this part changes, the lockfile is stale.
    """

    image: str
    """`image` in hpcenv.toml."""
    python: str | None = None
    """`python` in hpcenv.toml."""
    platform: str
    """`platform` in hpcenv.toml."""


class LayerTable(LockTable):
    """[[container.layers]]: one layer of the image."""

    digest: str
    """sha256 of the compressed layer, as it is pulled."""
    diff_id: str
    """sha256 of the layer's content, not compressed."""
    size: int
    """Bytes of the compressed layer."""
    media_type: str
    """OCI or Docker media type of the layer."""


class SifTable(LockTable):
    """[container.sif]: the file that the nodes run, and how it was made."""

    sha256: str
    size: int
    """Bytes of the file. The size is a quick check before the file is hashed."""
    partition_sha256: str
    """sha256 of the root file system inside: what `apptainer sign` signs."""
    partition_size: int
    """Bytes of the root file system."""
    compression: str
    """Compression of the root file system."""
    arch: str
    """Architecture in the SIF's header."""
    built_with: str | None = None
    """Programs on which the bytes of the file depend, with versions."""
    builder: str | None = None
    """`hpcenv` if hpcenv made the file from the layers; `apptainer` if `apptainer build` made it."""
    mksquashfs_args: tuple[str, ...] = ()
    """Options of mksquashfs."""
    source_date_epoch: int | None = None
    """The time that replaces every time in the file."""


class OverlayTable(LockTable):
    """[container.overlay]: the squashfs that is mounted read-only over the image.

    The path of the squashfs is not locked, because it differs between clusters.
    """

    form: Literal["squashfs", "folder"]
    """`squashfs`; `folder` only in older lockfiles."""
    use: OverlayUse
    """`venv`: the Python of this virtual environment starts the ranks. `packages`: a folder on PYTHONPATH. `layer`:
    over the whole image, only in older lockfiles."""
    target: str | None = None
    """Path in the container; absent only in older lockfiles."""
    sha256: str | None = None
    size: int | None = None
    """Bytes of the squashfs."""
    tree_sha256: str | None = None
    """Digest of the file tree in the squashfs. It does not depend on how the squashfs was packed."""
    content: str | None = None
    python_path: str | None = None
    """PYTHONPATH of the image itself. It follows the packages on PYTHONPATH if the project does not set PYTHONPATH."""

    @property
    def digest(self) -> str:
        """The identity that the nodes compare."""
        return (self.sha256 if self.form == "squashfs" else self.content) or ""

    @property
    def can_be_mounted(self) -> bool:
        """Whether the overlay is a squashfs at a target. Since 2026-11-25, hpcenv locks and mounts no other form."""
        return self.form == "squashfs" and self.use != "layer" and self.target is not None

    @property
    def in_words(self) -> str:
        """A description, for messages."""
        place = "over the whole image" if self.use == "layer" else f"at {self.target or 'its own path'}"
        return f"a {self.form} {place}"


class ContainerTable(LockTable):
    """[container]: the image's identity chain, from tag to content.

    If a SIF was not made from an image in a registry or layout, only the digests of the SIF itself are here.
    """

    reference: str
    index_digest: str | None = None
    manifest_digest: str | None = None
    digest_origin: str | None = None
    config_digest: str | None = None
    rootfs_chain_id: str | None = None
    tree_sha256: str | None = None
    platform: str
    env_digest: str | None = None
    nvidia: dict[str, str] = {}
    """The image's NVIDIA_* variables and CUDA_VERSION."""
    layers: tuple[LayerTable, ...] = ()
    """The image's layers, in order."""
    sif: SifTable
    """The file that the nodes run, and how it was made."""
    overlay: OverlayTable | None = None
    """The squashfs that is mounted read-only over the image (`overlay` in hpcenv.toml). The path of the squashfs is
    not locked."""

    @property
    def digest(self) -> str:
        """The best name of this container: the image's manifest digest, otherwise the sha256 of the SIF."""
        return self.manifest_digest or f"sha256:{self.sif.sha256}"


class BuiltTable(LockTable):
    """[packages.dist.wheel.built]: the source and the compilers of a wheel that was compiled in its image."""

    source_sha256: str | None = None
    """sha256 of the source archive."""
    compiler: str
    """First line of `c++ --version`."""
    nvcc: str | None = None
    """Version of the CUDA compiler. The key is missing for a build without CUDA."""
    arch_list: str | None = None
    """TORCH_CUDA_ARCH_LIST: the GPU architectures that the wheel has kernels for."""


class WheelTable(LockTable):
    """[packages.dist.wheel]: the wheel file that a distribution came from, and how its sha256 was confirmed."""

    filename: str | None = None
    """The wheel's file name."""
    sha256: str | None = None
    """sha256 of the wheel."""
    index: str | None = None
    """Source of the file: `pypi`, `extra-N` or `find-links`."""
    proof: Literal["built", "claimed", "direct-url", "embedded-lock", "install-report", "record", "index-only", "none"]
    """How the sha256 was confirmed; `none`: no sha256. `record`: a wheel in an index has the installed RECORD digest.
    `direct-url`: the file that direct_url.json names has this digest. `claimed`: only direct_url.json states the
    sha256; no file was compared. `index-only`: the index has one fitting file; it was not compared. `built`: compiled
    in the image itself."""
    reason: str | None = None
    """Why the proof is not stronger."""
    built: BuiltTable | None = None
    """Source and compilers of a wheel that the image's own build compiled (`proof` is `built`)."""


class DirectUrlTable(LockTable):
    """[packages.dist.direct-url]: where a distribution came from, if it did not come from an index."""

    url: str | None = None
    """The address, without user, password and query."""
    commit_id: str | None = None
    """Commit that the distribution was installed from, or that an editable install runs."""
    editable: bool | None = None
    """Whether the distribution is an editable install."""
    dirty: bool | None = None
    """Whether the working tree of an editable install was changed."""
    diff_sha256: str | None = None
    """Digest of the difference from `commit-id`, with importable files that git ignores; `none` if nothing differs."""
    files_sha256: str | None = None
    """Digest of the distribution's importable files, if git did not give the values above."""
    hash: str | None = None
    """`sha256=HEX` of the file that was installed."""


class DistTable(LockTable):
    """[[packages.dist]]: one installed distribution.

    `content-sha256` exists only if the distribution was modified before it was locked. `programs-sha256` exists only if
    the distribution has programs that are not mere launchers of its entry points. `layer` is `overlay` if the
    distribution is in the overlay. `hides` is the version in the image of a distribution that is in the overlay.
    """

    name: str
    """Name, normalised (PEP 503)."""
    version: str
    """Version, normalised (PEP 440)."""
    layer: Literal["overlay"] | None = None
    hides: str | None = None
    build: str | None = None
    """`Build:` of its WHEEL file."""
    tags: tuple[str, ...] = ()
    """`Tag:` lines of its WHEEL file."""
    source: str | None = None
    record_sha256: str | None = None
    content_sha256: str | None = None
    programs_sha256: str | None = None
    reason: str | None = None
    """Why the distribution has no digest, for example: no RECORD, or an editable install."""
    direct_url: DirectUrlTable | None = None
    """Where the distribution came from, if it did not come from an index (PEP 610)."""
    wheel: WheelTable | None = None
    """The wheel that the distribution came from. Not part of the fingerprint."""


CondaProof = Literal["pinned", "conda-meta", "none"]


class CondaTable(LockTable):
    """[[packages.conda-package]]: a package that `conda-digest` covers, and its archive."""

    name: str
    """Name, as conda writes it."""
    version: str
    """Version, as conda writes it."""
    build: str | None = None
    """conda's build string."""
    channel: str | None = None
    """The last part of the channel's address. The host is left out, because it may be a mirror."""
    sha256: str | None = None
    """sha256 of the archive, as the record in conda-meta says."""
    md5: str | None = None
    """md5 of the archive, as the record in conda-meta says."""
    dists: tuple[str, ...] = ()
    """The Python distributions that this package installed: names in [[packages.dist]]."""
    proof: CondaProof
    """How the archive was confirmed. `conda-meta`: the package's record names the archive, and every file is as
    recorded. `pinned`: the same, and a file of `lock --from` pins this sha256. `none`: see `reason`."""
    reason: str | None = None
    """Why there is no proof."""


class PackagesTable(LockTable):
    """[packages]: every installed distribution. `env-digest` is the digest over all distributions (hpcenv-env-v1)."""

    count: int
    env_digest: str
    content_digest: str | None = None
    conda_count: int | None = None
    conda_digest: str | None = None
    conda_content_digest: str | None = None
    conda_modified: tuple[str, ...] = ()
    unlisted_count: int
    unlisted_digest: str
    dist: tuple[DistTable, ...] = ()
    """One installed distribution."""
    conda_package: tuple[CondaTable, ...] = ()
    """One package that conda installed, with or without Python code. The fingerprint does not cover this table:
    `conda-digest` covers name, version, build, hash and channel, and `conda-content-digest` covers the files."""


class LockedHostTable(LockTable):
    """[host]: what the nodes must offer. `gpu` and `gpu-memory` (`40 GB`) are written as in hpcenv.toml."""

    driver_min: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    nvidia_require: dict[str, str] = {}
    """Rules of the image about drivers and GPUs, by variable."""


class LockedBindTable(LockTable):
    """[[bind]]: a bind of hpcenv.toml, without its source."""

    target: str
    """Path in the container."""
    read_only: bool = False
    """Whether the container cannot write to it."""
    content: str | None = None
    """Digest of the bind's content, if the bind hides files of the image or if Python looks for code in it."""
    code: dict[str, str] = {}
    """Digests of the folders of the bind from which Python loads code, by path in the container."""


class LockedDeterminismTable(LockTable):
    """[determinism]: how exactly runs must repeat. This decides how strictly nodes and runs are compared."""

    profile: Annotated[DeterminismProfile, BeforeValidator(_renew_profile)] = "off"


class CodeTable(LockTable):
    """[code]: state of the code, in the lockfile copy of a run."""

    commit: str | None = None
    """Commit of the working tree."""
    dirty: bool | None = None
    """Whether the working tree had uncommitted changes."""
    diff_sha256: str | None = None
    """sha256 of the uncommitted changes."""
    script_sha256: str | None = None
    workdir: Literal["copy", "live"] | None = None
    """`copy`: the run worked in its own copy of the project. `live`: the run worked in the project itself."""
    digest: str | None = None
    """sha256 over all files of the run's copy."""
    reason: str | None = None
    """Why the state of the code is unknown."""


class LockedDataTable(LockTable):
    """[data.NAME]: state of the data at submission, in the lockfile copy of a run."""

    path: str
    """Path of the data."""
    compare: DataCompare
    """How the nodes compare the data: `sha256`, `size-and-time` or `list` (names and sizes)."""
    state: str
    """Number of files, bytes, and the digest of the compared content."""
    hub: str | None = None
    """Repository and commit, for data of a hub."""


class RunTable(LockTable):
    """[run]: command, nodes, GPUs and ranks, in the lockfile copy of a run."""

    argv: tuple[str, ...] = ()
    r"""The script and its arguments; bytes that are not UTF-8 are written as `\xff`."""
    nodes: int
    """How many nodes."""
    gpus_per_node: int
    """GPUs of each node."""
    nproc_per_node: int
    """Ranks on each node."""
    backend: str
    """Backend of torch.distributed."""
    env: dict[str, str] = {}
    """Variables that the user or the project set for the ranks."""


class Lockfile(LockTable):
    """A whole lockfile.

    Attributes:
        facts: dotted name -> value for all other fields, as the probe reported them. Examples of names are
            `python.version`, `torch.version`, `libs.nccl.version` and `system.glibc`. In the file these fields are in
            tables: [python], [torch], [libs.nccl], [system].
    """

    schema_: int
    """Major version of this format. hpcenv refuses a newer version."""
    revision: int = 0
    """Minor version. A new revision may add keys and change what the digests cover (decision 0039). For a lockfile of
    an older revision, the older rules stay valid."""
    generated_by: str
    """Which hpcenv wrote the file. Not part of the fingerprint."""
    fingerprint: str
    """Short name of everything that is locked, for a paper's appendix."""
    kind: Literal["sif", "host"]
    """`sif` for an image, `host` for a Python environment of the machine."""
    asked: AskedTable
    """The part of hpcenv.toml that this lockfile was made for."""
    container: ContainerTable | None = None
    """The image's identity chain, from tag to content. This table exists only if `kind` is `sif`."""
    facts: dict[str, str | int | tuple[str, ...]] = {}
    packages: PackagesTable
    """Every installed distribution."""
    env: dict[str, str] = {}
    """`[env]` in hpcenv.toml, by variable. If the name looks like a credential, only the name is kept."""
    bind: tuple[LockedBindTable, ...] = ()
    """A `[[bind]]` of hpcenv.toml. The source of the bind is not locked, because it differs from cluster to cluster."""
    host: LockedHostTable = LockedHostTable()
    """What the nodes must offer. This table describes the nodes, not the identity of the environment."""
    determinism: LockedDeterminismTable = LockedDeterminismTable()
    """How strictly nodes and runs are compared."""
    code: CodeTable | None = None
    """State of the code. This table is only in the copy of a run (`runs/NAME/lock.toml`)."""
    run: RunTable | None = None
    """Command, nodes, GPUs and ranks. This table is only in the copy of a run."""
    data: dict[str, LockedDataTable] = {}
    """Data that `[[data]]` in hpcenv.toml names. This table is only in the copy of a run."""
    unknown: dict[str, str] = {}
    """Fields that could not be read when the environment was locked, and the reason for each field."""
    policy: dict[str, Severity] = {}
    """Severities that the project changed."""

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a file that was truncated or edited, because it could weaken the gate without notice.

        Return the lockfile itself.

        Raises:
            ValueError: the file is truncated or edited. The message says what is wrong.
        """
        if (self.kind == "sif") != (self.container is not None):
            raise ValueError(f"kind is {self.kind!r}, but [container] is {'there' if self.container else 'missing'}")
        if (self.kind == "host") != (self.asked.image == "host"):
            raise ValueError(f"kind is {self.kind!r}, but asked.image is {self.asked.image!r}")
        overlay = None if self.container is None else self.container.overlay
        if overlay is not None and not overlay.digest:
            raise ValueError("container.overlay has no digest")
        missing = [field for field in REQUIRED if field in _FACT_FIELDS and field not in self.facts]
        if missing:
            raise ValueError(f"`{missing[0]}` is missing")
        if self.packages.count != len(self.packages.dist):
            raise ValueError(f"packages.count is {self.packages.count}, but {len(self.packages.dist)} are listed")
        for field in self.facts:
            parents = {field.rsplit(".", n)[0] for n in range(1, field.count(".") + 1)}
            if not parents or parents & self.facts.keys():
                raise ValueError(f"`{field}` is no fact: a table and a value have one name")
        return self


# hpcenv writes no lockfile without these fields, because it cannot check a job without them.
REQUIRED = ("python.version", "packages.env-digest", "torch.version")

# Top-level tables with facts under the names of the probe, each with a description.
FACT_TABLES = {
    "python": "The interpreter and where it looks for modules.",
    "torch": "The build of torch, read without importing it.",
    "jax": "JAX, its library and its plug-in for CUDA. Only in environments with jax.",
    "libs": "Libraries that torch loads, as the loader finds them, and the variables that change where the loader "
    "searches.",
    "loaded": "Files that the loader really mapped after `import torch`. Only `lock --deep` writes this table.",
    "system": "The system inside.",
}
_FACT_FIELDS = tuple(field for field in REQUIRED if field.split(".", maxsplit=1)[0] in FACT_TABLES)

# Facts that are paths on one machine: not part of an environment's identity.
NOT_LOCKED = ("python.executable", "python.prefix")

# The writer, the fingerprint itself, and the tables of one run do not describe the environment.
_NOT_COVERED = ("generated-by", "fingerprint", "revision", "code", "run", "data")


def fingerprint(lockfile: dict[str, Any]) -> str:
    """Return the short name of the locked environment, for a paper's appendix.

    The name is `hpc2-` (`hpc1-` before revision 2) and 12 hex digits of a sha256. The sha256 covers the lockfile as
    canonical JSON (sorted keys, no blanks, no empty tables, UTF-8). It does not cover the name of the program that
    wrote the lockfile and the tables that belong to one run.
    """
    second = rules.has_rule("fingerprint", lockfile.get("revision", 0))
    covered = _without_empty_tables({k: v for k, v in lockfile.items() if k not in _NOT_COVERED})
    packages = covered.get("packages", {})
    # The wheel of a package is found through the user's package index, not in the environment.
    dists = [{k: v for k, v in dist.items() if k != "wheel"} for dist in packages.get("dist", ())]
    # The table `conda-package` is left out, because `conda-digest` covers these packages.
    covered["packages"] = {k: v for k, v in packages.items() if k != "conda-package"} | {"dist": dists}
    if second:
        covered = _without_empty_tables(_same_everywhere(covered))
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return ("hpc2-" if second else "hpc1-") + hashlib.sha256(text.encode()).hexdigest()[:12]


def _same_everywhere(covered: dict[str, Any]) -> dict[str, Any]:
    """Return a lockfile's data without values that can differ between equal environments.

    Such values depend on paths, installers or login nodes. For example, each installer writes the address of a wheel in
    its own way. The digests cover the content of the wheel.
    """
    packages = covered["packages"]
    dists = [
        _without_empty_tables(dist | {"direct-url": _without(dist.get("direct-url", {}), "url", "hash")})
        for dist in packages["dist"]
    ]
    system = covered.get("system", {})
    if covered.get("kind") == "host":
        system = _without(system, *(key for key in system if key.startswith("packages-")))
    asked = _without(covered.get("asked", {}), "python")
    return covered | {"asked": asked, "system": system, "packages": packages | {"dist": dists}}


def _without(table: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in keys}


_LAST_TABLES = ("env", "bind", "host", "determinism", "code", "run", "data", "unknown", "policy", "packages")


def to_data(lockfile: Lockfile) -> dict[str, Any]:
    """Return the lockfile as plain data in canonical order, ready for a TOML writer.

    Values that are equal to their default are left out. So if a new hpcenv adds a key, the fingerprint of an older
    lockfile does not change.
    """
    table = document.plain(lockfile, defaults=False)
    data: dict[str, Any] = {"schema": lockfile.schema_, "revision": lockfile.revision} | table
    facts = data.pop("facts")
    tail = {name: data.pop(name) for name in _LAST_TABLES if name in data}
    for field in sorted(facts):
        table = data
        *tables, key = field.split(".")
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = facts[field]
    # Packages are long and come last.
    return _without_empty_tables(data | tail)


def _without_empty_tables(data: dict[str, Any]) -> dict[str, Any]:
    """Return `data` without empty tables."""
    kept = {k: _without_empty_tables(v) if isinstance(v, dict) else v for k, v in data.items()}
    return {key: value for key, value in kept.items() if value != {}}


def from_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Lockfile` for a parsed TOML file.

    The keys of [python], [torch], [libs], [loaded] and [system] become facts with dotted names (`python.version`).
    """
    shaped = {key: value for key, value in data.items() if key not in FACT_TABLES}
    facts: dict[str, Any] = {}
    for name in FACT_TABLES:
        facts |= _flat(name, data.get(name, {}))
    return shaped | {"facts": facts}


def known_part(data: dict[str, Any], kind: type[Document] = Lockfile) -> dict[str, Any]:
    """Return a lockfile of a newer revision without the keys that this version does not know.

    A revision may add keys anywhere, but it must not change the meaning of known keys.
    """
    known: dict[str, Any] = {}
    for key, value in data.items():
        if kind is Lockfile and key in FACT_TABLES:
            known[key] = _known_facts(value)
        elif key in document.keys(kind):
            table = table_at(kind, [key])
            known[key] = value if table is None else _known_tables(value, table)
    return known


def _known_tables(value: Any, table: type[Document]) -> Any:
    if isinstance(value, list):
        return [_known_tables(item, table) for item in value]
    return known_part(value, table) if isinstance(value, dict) else value


def unknown_keys(data: Any, known: Any) -> set[str]:
    """Return the dotted keys that `known_part` left out of `data`. A key of several list entries appears once."""
    if isinstance(data, list) and isinstance(known, list):
        found = (unknown_keys(item, kept) for item, kept in zip(data, known, strict=False))
        return set().union(*found)
    if not isinstance(data, dict) or not isinstance(known, dict):
        return set()
    left_out = {key for key in data if key not in known}
    inner = {f"{key}.{name}" for key in known.keys() & data.keys() for name in unknown_keys(data[key], known[key])}
    return left_out | inner


def _known_facts(value: Any) -> Any:
    """Keep facts of the types that this version compares."""
    if not isinstance(value, dict):
        return value
    return {key: _known_facts(inner) for key, inner in value.items() if _is_fact(inner)}


def _is_fact(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, str) for item in value)
    return isinstance(value, (str, dict)) or type(value) is int


def _flat(name: str, value: Any) -> dict[str, Any]:
    """Return the values in nested tables by their dotted names."""
    if not isinstance(value, dict):
        return {name: tuple(value) if isinstance(value, list) else value}
    return {inner: one for key, table in value.items() for inner, one in _flat(f"{name}.{key}", table).items()}


def cuda_of(lockfile: Lockfile) -> str | None:
    """Return the CUDA release that the locked torch was built for; None for a CPU build."""
    cuda = lockfile.facts.get("torch.cuda")
    return cuda if isinstance(cuda, str) and cuda not in ("none", "absent") else None


def gpu_memory_gb(lockfile: Lockfile) -> int:
    """Return the minimum memory of each GPU in 10^9 bytes; 0 if any size is enough."""
    return gigabytes(lockfile.host.gpu_memory or "") or 0


def jax_cuda_of(lockfile: Lockfile) -> str | None:
    """Return the newest CUDA release of JAX's plug-ins for CUDA, for example `13`; None without a plug-in."""
    releases = str(lockfile.facts.get("jax.cuda", "")).split(", ")
    return max((one for one in releases if one.isdigit()), key=int, default=None)


GpuSupport = Literal["cuda", "hip", "none", "unknown"]


def gpu_support(lockfile: Lockfile) -> GpuSupport:
    """Return which GPUs the locked torch can use: `none` for a CPU build, `unknown` without torch.

    If torch is a CPU build, but JAX has a plug-in for CUDA, the answer is `unknown`, because the job may use GPUs.
    """
    if cuda_of(lockfile) is not None:
        return "cuda"
    if lockfile.facts.get("torch.hip") not in (None, "none", "absent"):
        return "hip"
    cpu_only = lockfile.facts.get("torch.cuda") == "none" and jax_cuda_of(lockfile) is None
    return "none" if cpu_only else "unknown"


def compares_gpus(lockfile: Lockfile, gpus: int) -> bool:
    """Return whether hpcenv compares the GPUs of the nodes in a run with this number of GPUs per node."""
    return gpus > 0 and gpu_support(lockfile) != "none"


def arch_list_of(lockfile: Lockfile) -> tuple[str, ...]:
    """Return the GPU architectures that the locked torch has kernels for; empty when unknown."""
    found = lockfile.facts.get("torch.arch-list")
    return found if isinstance(found, tuple) else ()


def machine_of(lockfile: Lockfile) -> str:
    """Return the processor architecture of the locked environment; `x86_64` when unknown."""
    return str(lockfile.facts.get("system.machine", "x86_64"))


def built_for(lockfile: Lockfile) -> dict[str, tuple[str, ...]]:
    """Return the packages that were compiled in the image for GPUs, each with its GPU architectures."""
    wheels = {f"{dist.name} {dist.version}": dist.wheel for dist in lockfile.packages.dist}
    built = {name: wheel.built for name, wheel in wheels.items() if wheel is not None and wheel.built is not None}
    return {name: of_build(table.arch_list) for name, table in built.items() if table.arch_list}


def policy_problems(lockfile: Lockfile) -> tuple[str, ...]:
    """Return which keys of [policy] cannot act on this environment, each with the reason."""
    names = set(lockfile.facts)
    parts = [row.name for row in fields.FIELDS if row.name.startswith("packages.*.") and not row.fixed]
    for dist in lockfile.packages.dist:
        names |= {package_field(dist.name), *(row.replace("*", dist.name) for row in parts)}
    return severity_model.problems(lockfile.policy, names)


def severities_of(lockfile: Lockfile, *, gpus: bool = True, profile: DeterminismProfile | None = None) -> Severities:
    """Return the severities that a lockfile's policy and profile give.

    Args:
        gpus: whether the job uses GPUs.
        profile: a profile that replaces the lockfile's own.
    """
    return severity_model.severities(lockfile.policy, profile or lockfile.determinism.profile, gpus=gpus)


def expectations(lockfile: Lockfile, *, level: FieldLevel, origin: str) -> tuple[Expectation, ...]:
    """Return the locked values that every node is compared with. The table of fields says which values a node compares.

    Args:
        level: the level of the check on the nodes. Fields that need a higher level are left out.
        origin: path of the lockfile, for messages.
    """
    locked: dict[str, Value] = dict(lockfile.facts)
    if lockfile.container is not None:
        locked |= _flat("container", document.plain(lockfile.container, "layers"))
    packages = document.plain(lockfile.packages, "dist", "conda_package")
    if lockfile.packages.conda_content_digest is None:
        packages.pop("conda-modified", None)  # hpcenv did not read this field when it wrote an older revision
    locked |= _flat("packages", packages)
    for dist in lockfile.packages.dist:
        sources = source_fields(dist.direct_url).items()
        locked |= {f"packages.{dist.name}.{part}": value for part, value in sources}
    severities = severities_of(lockfile)
    expected = []
    for field in sorted(locked):
        if not _compared_at(field, level):
            continue
        note = _unlisted_note(lockfile) if field == "packages.unlisted-digest" else ""
        expected.append(
            Expectation(field=field, value=locked[field], severity=severities.of(field), origin=origin, note=note)
        )
    return (*expected, *_unknown_expectations(lockfile, severities, level=level, origin=origin))


def env_expectations(lockfile: Lockfile, env: Mapping[str, str], *, origin: str) -> tuple[Expectation, ...]:
    """Return the expected variables of the ranks: [env] as it was locked.

    Args:
        env: the present [env] of hpcenv.toml. Variables that were added since the lock are expected to be absent.
        origin: path of the lockfile, for messages.
    """
    names = sorted({*lockfile.env, *env})
    if not names:
        return ()
    severities = severities_of(lockfile)
    return tuple(
        Expectation(
            field=f"env.{name}",
            value=lockfile.env.get(name, "absent"),
            severity=severities.of(f"env.{name}"),
            origin=origin,
        )
        for name in names
    )


def not_locked(lockfile: Lockfile) -> tuple[str, ...]:
    """Return the fields that this lockfile lacks because its revision is older, and that are not compared."""
    if lockfile.kind != "host":
        return ()
    return tuple(
        field for revision, added in ADDED_IN_REVISION.items() if revision > lockfile.revision for field in added
    )


def not_covered(lockfile: Lockfile, *, data: bool = False) -> tuple[str, ...]:
    """Return what the digests of a lockfile do not cover because its revision is older, as texts.

    Args:
        data: whether the project has [[data]].
    """
    # The hash of a SIF covers all files in it.
    left_out = {*(() if data else ("empty-folders",)), *(() if lockfile.bind else ("path-binds",))}
    of_sif = {"empty-folders", "path-binds"} | ({"preloaded"} if lockfile.bind else set())
    counted = (set(rules.RULES) if lockfile.kind == "host" else of_sif) - left_out
    found = ((rule, text) for rule, (since, text) in rules.RULES.items() if since > lockfile.revision)
    return tuple(text for rule, text in found if rule in counted and text)


def bind_contents(lockfile: Lockfile) -> tuple[tuple[str, str], ...]:
    """Return the paths of binds whose content is locked, each with its digest."""
    return tuple(
        one
        for bind in lockfile.bind
        for one in (*(() if bind.content is None else ((bind.target, bind.content),)), *sorted(bind.code.items()))
    )


def bind_expectations(lockfile: Lockfile, *, origin: str) -> tuple[Expectation, ...]:
    """Return the expected content of binds that hide files of the image; empty without such a bind."""
    contents = tuple(f"{path} {digest}" for path, digest in bind_contents(lockfile))
    if not contents:
        return ()
    field = "container.bind-content"
    return (Expectation(field=field, value=contents, severity=severities_of(lockfile).of(field), origin=origin),)


def source_fields(direct_url: DirectUrlTable | None) -> dict[str, Value]:
    """Return the compared fields that describe where a distribution came from."""
    if direct_url is None:
        return {}
    parts = {
        "commit-id": direct_url.commit_id or None,
        "dirty": direct_url.dirty,
        "diff-sha256": direct_url.diff_sha256,
        "files-sha256": direct_url.files_sha256,
    }
    return {part: value for part, value in parts.items() if value is not None}


def _unlisted_note(lockfile: Lockfile) -> str:
    count = lockfile.packages.unlisted_count
    return f"{count or 'no'} such {'file' if count == 1 else 'files'} when it was locked"


# Replaces the value of a field that could not be read when the environment was locked.
UNKNOWN_WHEN_LOCKED = "unknown when it was locked"


def _unknown_expectations(
    lockfile: Lockfile, severities: Severities, *, level: FieldLevel, origin: str
) -> tuple[Expectation, ...]:
    """Return the fields that were unknown when they were locked.

    Every node reports that such fields were not compared.
    """
    matter = [
        field
        for field in sorted(lockfile.unknown)
        if _compared_at(field, level) and severities.of(field) in ("must", "warn")
    ]
    return tuple(
        Expectation(field=field, value=UNKNOWN_WHEN_LOCKED, severity=fields.UNKNOWN_WHEN_LOCKED, origin=origin)
        for field in matter
    )


def _compared_at(field: str, level: FieldLevel) -> bool:
    """Return whether a node compares this field with the lockfile at this level."""
    row = fields.find(field)
    return row is not None and "lockfile" in row.judged_by and LEVELS.index(row.level) <= LEVELS.index(level)


def package_expectations(lockfile: Lockfile) -> tuple[PackageExpectation, ...]:
    """Return the locked distributions in the form the nodes compare."""
    return tuple(
        PackageExpectation(
            name=dist.name,
            version=dist.version,
            record_sha256=dist.record_sha256 or "",
            # A distribution has a content digest only if its files were modified before it was locked.
            # Otherwise its files are equal to its RECORD.
            content_sha256=dist.content_sha256 or dist.record_sha256 or "",
            programs_sha256=dist.programs_sha256 or ("none" if _has_programs(lockfile, dist) else ""),
        )
        for dist in lockfile.packages.dist
    )


def _has_programs(lockfile: Lockfile, dist: DistTable) -> bool:
    """Return whether the lockfile records the programs of a package. It also records that a package has none."""
    return lockfile.revision >= 1 and dist.record_sha256 is not None
