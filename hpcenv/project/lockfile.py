"""The lockfile: what an environment was resolved to, and its canonical form.

Runs on: LOGIN NODE.

Schema 1: the identity chain of the container, the SIF, Python, torch, libraries, every package with
its digest, and the system. It holds data only, never code. It holds no time, host name or path of a
machine: the same environment gives the same bytes for every user, at any time. hpcenv refuses a newer
major `schema`; a newer `revision` may add keys (the rule of PEP 751 for `lock-version`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator
from typing_extensions import Self

from hpcenv.judge.compat.architectures import of_build
from hpcenv.project import document, fields
from hpcenv.project import severities as severity_model
from hpcenv.project.document import Document, table_at
from hpcenv.project.fields import LEVELS, FieldLevel, Profile
from hpcenv.records.manifest import (
    DataCompare,
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
REVISION = 1
# Fields that a lockfile of an older revision of a host environment does not have. (In a SIF its hash covers them.)
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
    """Return the name of a determinism profile; lockfiles of before 2026-11 have `default` for `off`."""
    return "off" if value == "default" else value


class LockTable(Document):
    """A table of the lockfile. hpcenv writes it; users do not edit it."""


class AskedTable(LockTable):
    """[asked]: the part of hpcenv.toml that this lockfile was made from; decides whether it is stale."""

    image: str
    python: str | None = None
    platform: str


class LayerTable(LockTable):
    """One layer: compressed digest as pulled, and `diff-id` of its content."""

    digest: str
    diff_id: str
    size: int
    media_type: str


class SifTable(LockTable):
    """[container.sif]: the file that the nodes run, and how it was made."""

    sha256: str
    size: int
    partition_sha256: str
    partition_size: int
    compression: str
    arch: str
    built_with: str | None = None
    builder: str | None = None
    mksquashfs_args: tuple[str, ...] = ()
    source_date_epoch: int | None = None


class OverlayTable(LockTable):
    """[container.overlay]: what is mounted read-only over the image.

    Its path is not locked: it differs between clusters.

    Attributes:
        form: a squashfs file; older lockfiles may have a folder.
        use: a virtual environment, or packages on PYTHONPATH; older lockfiles may have a layer over the whole image.
        target: where it is mounted; older lockfiles may have none.
        sha256, size: of a squashfs file.
        tree_sha256: digest of the file tree in it, equal for every squashfs of this tree.
        content: digest over all files of a folder.
        python_path: PYTHONPATH of the image itself; it comes after `packages`, unless the project sets PYTHONPATH.
    """

    form: Literal["squashfs", "folder"]
    use: OverlayUse
    target: str | None = None
    sha256: str | None = None
    size: int | None = None
    tree_sha256: str | None = None
    content: str | None = None
    python_path: str | None = None

    @property
    def digest(self) -> str:
        """The identity that the nodes compare."""
        return (self.sha256 if self.form == "squashfs" else self.content) or ""

    @property
    def can_be_mounted(self) -> bool:
        """Whether it is a squashfs at a target. hpcenv locks and mounts nothing else since 2026-11-25."""
        return self.form == "squashfs" and self.use != "layer" and self.target is not None

    @property
    def in_words(self) -> str:
        """What it is, for messages."""
        place = "over the whole image" if self.use == "layer" else f"at {self.target or 'its own path'}"
        return f"a {self.form} {place}"


class ContainerTable(LockTable):
    """[container]: the image's identity chain, tag to content.

    A SIF that was not made from an image in a registry or layout has only the digests of the SIF itself.

    `digest_origin` says where the manifest digest comes from: a registry, a layout, or, for
    an archive of `docker save`, hpcenv's own canonical manifest. `tree_sha256` is the digest
    of the file tree, equal for every SIF of this image; of a SIF from a registry that of
    the tree in it. `nvidia` holds the image's NVIDIA_* variables and CUDA_VERSION: what it needs from a driver.
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
    layers: tuple[LayerTable, ...] = ()
    sif: SifTable
    overlay: OverlayTable | None = None

    @property
    def digest(self) -> str:
        """The best name of this container: the image's manifest digest, otherwise the sha256 of the SIF."""
        return self.manifest_digest or f"sha256:{self.sif.sha256}"


class BuiltTable(LockTable):
    """[packages.dist.wheel.built]: from what and with what a wheel was compiled in its image.

    Attributes:
        source_sha256: of the source archive.
        compiler: the first line of `c++ --version`.
        nvcc: version of the CUDA compiler; None for a build without CUDA.
        arch_list: TORCH_CUDA_ARCH_LIST of the build.
    """

    source_sha256: str | None = None
    compiler: str
    nvcc: str | None = None
    arch_list: str | None = None


class WheelTable(LockTable):
    """[packages.dist.wheel]: the wheel file a distribution came from, and how that was proved."""

    filename: str | None = None
    sha256: str | None = None
    index: str | None = None
    proof: Literal["built", "direct-url", "embedded-lock", "install-report", "record", "index-only", "none"]
    reason: str | None = None
    built: BuiltTable | None = None


class DirectUrlTable(LockTable):
    """[packages.dist.direct-url]: where a distribution came from, if not from an index.

    `diff-sha256` is the word `none` where the working tree equals its commit. It is missing where that is not
    known; then there is `files-sha256` instead.
    """

    url: str | None = None
    commit_id: str | None = None
    editable: bool | None = None
    dirty: bool | None = None
    diff_sha256: str | None = None
    files_sha256: str | None = None
    hash: str | None = None


class DistTable(LockTable):
    """[[packages.dist]]: one installed distribution.

    `content-sha256` is there only if the distribution was modified before it was locked, `programs-sha256` only if
    it has programs that are not mere launchers of its entry points. `layer` is `overlay` if it is not from the image;
    `hides` is the version that the image has of it then.
    """

    name: str
    version: str
    layer: Literal["overlay"] | None = None
    hides: str | None = None
    build: str | None = None
    tags: tuple[str, ...] = ()
    source: str | None = None
    record_sha256: str | None = None
    content_sha256: str | None = None
    programs_sha256: str | None = None
    reason: str | None = None
    direct_url: DirectUrlTable | None = None
    wheel: WheelTable | None = None


CondaProof = Literal["pinned", "conda-meta", "none"]


class CondaTable(LockTable):
    """[[packages.conda-package]]: one package that conda installed, with or without Python in it.

    `conda-digest` and `conda-content-digest` are what is compared. This says which packages they cover, and which
    archive each one came from.
    """

    name: str
    version: str
    build: str | None = None
    channel: str | None = None
    sha256: str | None = None
    md5: str | None = None
    dists: tuple[str, ...] = ()
    proof: CondaProof
    reason: str | None = None


class PackagesTable(LockTable):
    """[packages]: every installed distribution; `env-digest` is their hpcenv-env-v1 root."""

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
    conda_package: tuple[CondaTable, ...] = ()


class LockedHostTable(LockTable):
    """[host]: what the nodes must offer; expectations, not identity.

    Attributes:
        driver_min: oldest driver that runs the locked CUDA build.
        gpu: the GPU that this was locked for, as hpcenv.toml names it.
        gpu_memory: the least memory of each GPU, as hpcenv.toml names it: `40 GB`.
        nvidia_require: rules of the image (NVIDIA_REQUIRE_*), checked on every node.
    """

    driver_min: str | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    nvidia_require: dict[str, str] = {}


class LockedBindTable(LockTable):
    """[[bind]]: a bind of hpcenv.toml. Its source is not locked: it differs from cluster to cluster.

    Attributes:
        target: path in the container.
        read_only: whether the container cannot write to it.
        content: digest of what it shows, if it hides a file or a folder with files of the image.
    """

    target: str
    read_only: bool = False
    content: str | None = None


class LockedDeterminismTable(LockTable):
    """[determinism]: how strictly runs must repeat; it decides how strict the comparison is."""

    profile: Annotated[Profile, BeforeValidator(_renew_profile)] = "off"


class CodeTable(LockTable):
    """[code]: state of the code, in the lockfile copy of a run."""

    commit: str | None = None
    dirty: bool | None = None
    diff_sha256: str | None = None
    script_sha256: str | None = None
    workdir: Literal["copy", "live"] | None = None
    digest: str | None = None
    reason: str | None = None


class LockedDataTable(LockTable):
    """[data.NAME]: data as they were at submission, in the lockfile copy of a run."""

    path: str
    compare: DataCompare
    state: str
    hub: str | None = None


class RunTable(LockTable):
    """[run]: command and shape, in the lockfile copy of a run."""

    argv: tuple[str, ...] = ()
    nodes: int
    gpus_per_node: int
    nproc_per_node: int
    backend: str
    env: dict[str, str] = {}


class Lockfile(LockTable):
    """A lockfile as a whole.

    Attributes:
        facts: every other field by its dotted name: `python.version`, `torch.version`,
            `libs.nccl.version`, `system.glibc` and so on, as the probe reported them. In
            the file they are in tables: [python], [torch], [libs.nccl], [system].
        env: [env] of hpcenv.toml; credentials without their value.
        bind: [[bind]] of hpcenv.toml.
        unknown: field -> why it could not be read when this was locked.
        policy: [policy] of hpcenv.toml, copied so that a loosened field is visible.
    """

    schema_: int
    revision: int = 0
    generated_by: str
    fingerprint: str
    kind: Literal["sif", "host"]
    asked: AskedTable
    container: ContainerTable | None = None
    facts: dict[str, str | int | tuple[str, ...]] = {}
    packages: PackagesTable
    env: dict[str, str] = {}
    bind: tuple[LockedBindTable, ...] = ()
    host: LockedHostTable = LockedHostTable()
    determinism: LockedDeterminismTable = LockedDeterminismTable()
    code: CodeTable | None = None
    run: RunTable | None = None
    data: dict[str, LockedDataTable] = {}
    unknown: dict[str, str] = {}
    policy: dict[str, Severity] = {}

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse a file that was cut short or edited: it must not weaken the gate without notice.

        Return the lockfile itself.

        Raises:
            ValueError: what is wrong.
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


# No lockfile is written without these fields: no job can be checked without them.
REQUIRED = ("python.version", "packages.env-digest", "torch.version")

# Top-level tables that hold facts as the probe named them.
FACT_TABLES = ("python", "torch", "libs", "loaded", "system")
_FACT_FIELDS = tuple(field for field in REQUIRED if field.split(".", maxsplit=1)[0] in FACT_TABLES)

# Facts that are paths on one machine: not part of an environment's identity.
NOT_LOCKED = ("python.executable", "python.prefix")

# The writer, the fingerprint itself, and what belongs to one run: none of them describes the environment.
_NOT_COVERED = ("generated-by", "fingerprint", "revision", "code", "run", "data")


def fingerprint(lockfile: dict[str, Any]) -> str:
    """Return the short name of what is locked, for a paper's appendix.

    It covers everything except the writer of the file and what belongs to one run: `hpc1-` and 12
    hex digits of the sha256 over canonical JSON (sorted keys, no blanks, no empty tables,
    UTF-8).
    """
    covered = _without_empty_tables({k: v for k, v in lockfile.items() if k not in _NOT_COVERED})
    packages = covered.get("packages", {})
    # The wheel of a package is found through the user's package index, not in the environment.
    dists = [{k: v for k, v in dist.items() if k != "wheel"} for dist in packages.get("dist", ())]
    # What `conda-digest` covers, and how it was proved.
    covered["packages"] = {k: v for k, v in packages.items() if k != "conda-package"} | {"dist": dists}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "hpc1-" + hashlib.sha256(text.encode()).hexdigest()[:12]


_LAST_TABLES = ("env", "bind", "host", "determinism", "code", "run", "data", "unknown", "policy", "packages")


def to_data(lockfile: Lockfile) -> dict[str, Any]:
    """Return the lockfile as plain data in canonical order, ready for a TOML writer.

    Values at their default are left out: a lockfile that is older than a key keeps its
    fingerprint.
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
        _flatten(name, data.get(name, {}), into=facts)
    return shaped | {"facts": facts}


def known_part(data: dict[str, Any], kind: type[Document] = Lockfile) -> dict[str, Any]:
    """Return a lockfile of a newer revision without the keys that this version does not know.

    A revision may add keys anywhere, but not change what the known ones mean.
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
    """Return the keys that `known_part` left out of `data`, dotted, those of all entries of a list once."""
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


def _flatten(prefix: str, value: Any, *, into: dict[str, Any]) -> None:
    if not isinstance(value, dict):
        into[prefix] = tuple(value) if isinstance(value, list) else value
        return
    for key, inner in value.items():
        _flatten(f"{prefix}.{key}", inner, into=into)


def cuda_of(lockfile: Lockfile) -> str | None:
    """Return the CUDA release that the locked torch was built for, None for a CPU build."""
    cuda = lockfile.facts.get("torch.cuda")
    return cuda if isinstance(cuda, str) and cuda not in ("none", "absent") else None


def gpu_memory_gb(lockfile: Lockfile) -> int:
    """Return the least memory of each GPU in 10^9 bytes, 0 for any."""
    return gigabytes(lockfile.host.gpu_memory or "") or 0


GpuSupport = Literal["cuda", "hip", "none", "unknown"]


def gpu_support(lockfile: Lockfile) -> GpuSupport:
    """Return which GPUs the locked torch can use: `none` for a CPU build, `unknown` without torch."""
    if cuda_of(lockfile) is not None:
        return "cuda"
    if lockfile.facts.get("torch.hip") not in (None, "none", "absent"):
        return "hip"
    return "none" if lockfile.facts.get("torch.cuda") == "none" else "unknown"


def compares_gpus(lockfile: Lockfile, gpus: int) -> bool:
    """Return whether the nodes of a run with so many GPUs each are judged by their GPUs."""
    return gpus > 0 and gpu_support(lockfile) != "none"


def arch_list_of(lockfile: Lockfile) -> tuple[str, ...]:
    """Return the GPU architectures that the locked torch has kernels for; empty when unknown."""
    found = lockfile.facts.get("torch.arch-list")
    return found if isinstance(found, tuple) else ()


def built_for(lockfile: Lockfile) -> dict[str, tuple[str, ...]]:
    """Return package -> GPU architectures, for the packages that were compiled in the image for GPUs."""
    wheels = {f"{dist.name} {dist.version}": dist.wheel for dist in lockfile.packages.dist}
    built = {name: wheel.built for name, wheel in wheels.items() if wheel is not None and wheel.built is not None}
    return {name: of_build(table.arch_list) for name, table in built.items() if table.arch_list}


def policy_problems(lockfile: Lockfile) -> tuple[str, ...]:
    """Return which keys of [policy] cannot act on this environment, each with the reason."""
    names = set(lockfile.facts)
    for dist in lockfile.packages.dist:
        names |= {package_field(dist.name), *(f"packages.{dist.name}.{part}" for part in _PACKAGE_PARTS)}
    return severity_model.problems(lockfile.policy, names)


_PACKAGE_PARTS = (
    "record-sha256",
    "content-sha256",
    "programs-sha256",
    "commit-id",
    "dirty",
    "diff-sha256",
    "files-sha256",
    "wheel-proof",
)


def severities_of(lockfile: Lockfile, *, gpus: bool = True, profile: Profile | None = None) -> Severities:
    """Return the severities that a lockfile's policy and profile give.

    Args:
        gpus: they are for a job that uses GPUs.
        profile: another profile than the lockfile's own.
    """
    return severity_model.severities(lockfile.policy, profile or lockfile.determinism.profile, gpus=gpus)


def expectations(lockfile: Lockfile, *, level: FieldLevel, origin: str) -> tuple[Expectation, ...]:
    """Flatten the lockfile into what every node is compared with.

    Args:
        level: how deep the nodes look; fields that need more are left out.
        origin: path of the lockfile, for messages.
    """
    locked: dict[str, Value] = dict(lockfile.facts)
    if lockfile.container is not None:
        locked["container.sif.sha256"] = lockfile.container.sif.sha256
        overlay = lockfile.container.overlay
        if overlay is not None and overlay.sha256 is not None:
            locked["container.overlay.sha256"] = overlay.sha256
    packages = document.plain(lockfile.packages, "dist", "conda_package")
    if lockfile.packages.conda_content_digest is None:
        packages.pop("conda-modified", None)  # an older revision: it was not read
    locked |= {f"packages.{key}": tuple(v) if isinstance(v, list) else v for key, v in packages.items()}
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
    """Return what the ranks' variables are compared with: [env] as it was locked.

    Args:
        env: [env] as hpcenv.toml has it now. What was added to it since then is expected to be absent.
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
    """Return the fields that a lockfile of an older revision does not have; nothing is compared in these."""
    if lockfile.kind != "host":
        return ()
    return tuple(
        field for revision, added in ADDED_IN_REVISION.items() if revision > lockfile.revision for field in added
    )


def bind_expectations(lockfile: Lockfile, *, origin: str) -> tuple[Expectation, ...]:
    """Return what the content of binds that hide files of the image is compared with; none without such a bind."""
    contents = tuple(f"{bind.target} {bind.content}" for bind in lockfile.bind if bind.content is not None)
    if not contents:
        return ()
    field = "container.bind-content"
    return (Expectation(field=field, value=contents, severity=severities_of(lockfile).of(field), origin=origin),)


def source_fields(direct_url: DirectUrlTable | None) -> dict[str, Value]:
    """Return the fields that describe where a distribution came from, and that are compared."""
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
    """Return the fields that the lockfile does not know: every node then reports that it did not compare them."""
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
    """Return whether a node compares this field with the lockfile, where it looks this deep."""
    row = fields.find(field)
    return row is not None and "lockfile" in row.judged_by and LEVELS.index(row.level) <= LEVELS.index(level)


def package_expectations(lockfile: Lockfile) -> tuple[PackageExpectation, ...]:
    """Return the locked distributions in the form the nodes compare."""
    return tuple(
        PackageExpectation(
            name=dist.name,
            version=dist.version,
            record_sha256=dist.record_sha256 or "",
            # Only a distribution that was modified when it was locked has a content digest;
            # otherwise its content is what RECORD lists.
            content_sha256=dist.content_sha256 or dist.record_sha256 or "",
            programs_sha256=dist.programs_sha256 or ("none" if _has_programs(lockfile, dist) else ""),
        )
        for dist in lockfile.packages.dist
    )


def _has_programs(lockfile: Lockfile, dist: DistTable) -> bool:
    """Return whether the lockfile says something about the programs of a package: that it has none, too."""
    return lockfile.revision >= 1 and dist.record_sha256 is not None
