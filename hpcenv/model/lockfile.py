"""The lockfile: what an environment was resolved to, and its canonical form.

Runs on: LOGIN NODE.

Schema 1, first cut of reference/lockfiles.md section 2: container identity chain, SIF,
Python, torch, libraries, every package with its digest, system. Data only, never code.
No time, host name or path of a machine stands in it, so the same environment gives the
same bytes whoever locks it and when. A newer major `schema` is refused, a newer
`revision` may add keys (PEP 751's rule for `lock-version`).
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from hpcenv.dataclass import dataclass
from hpcenv.dataclass import field as declared
from hpcenv.model import document, fields
from hpcenv.model.document import Document, table_at
from hpcenv.model.fields import LEVELS, Level, Profile
from hpcenv.wire import Expectation, PackageExpectation, Severity, Value

SCHEMA = 1
REVISION = 0


@dataclass(frozen=True, kw_only=True)
class LockTable(Document):
    """A table of the lockfile. Unlike hpcenv.toml, nobody writes it by hand."""


@dataclass(frozen=True, kw_only=True)
class AskedTable(LockTable):
    """[asked]: the part of hpcenv.toml that this lockfile answers; decides staleness."""

    image: str
    python: str | None = None
    platform: str


@dataclass(frozen=True, kw_only=True)
class LayerTable(LockTable):
    """One layer: compressed digest as pulled, and `diff-id` of its content."""

    digest: str
    diff_id: str
    size: int
    media_type: str


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class ContainerTable(LockTable):
    """[container]: the image's identity chain, tag to content.

    A SIF that was not made from an image in a registry or layout has no digests but its own.

    `digest_origin` says where the manifest digest comes from: a registry, a layout, or, for
    an archive of `docker save`, hpcenv's own canonical manifest. `tree_sha256` is the digest
    of the file tree, equal for every SIF of this image whoever made it. `nvidia` holds the
    image's NVIDIA_* variables and CUDA_VERSION: what it asks of a driver.
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
    nvidia: dict[str, str] = declared(default_factory=dict)
    layers: tuple[LayerTable, ...] = ()
    sif: SifTable

    @property
    def digest(self) -> str:
        """What names this container best: the image's manifest digest, else the SIF's own."""
        return self.manifest_digest or f"sha256:{self.sif.sha256}"


@dataclass(frozen=True, kw_only=True)
class WheelTable(LockTable):
    """[packages.dist.wheel]: the wheel file a distribution came from, and how that was proved."""

    filename: str | None = None
    sha256: str | None = None
    index: str | None = None
    proof: Literal["direct-url", "embedded-lock", "install-report", "record", "index-only", "none"]
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class DirectUrlTable(LockTable):
    """[packages.dist.direct-url]: where a distribution came from, if not from an index.

    `diff-sha256` is the word `none` where the working tree is its commit, and missing where that is not known;
    then `files-sha256` stands in its place.
    """

    url: str | None = None
    commit_id: str | None = None
    editable: bool | None = None
    dirty: bool | None = None
    diff_sha256: str | None = None
    files_sha256: str | None = None
    hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class DistTable(LockTable):
    """[[packages.dist]]: one installed distribution.

    `content-sha256` stands only where a distribution was modified before it was locked.
    """

    name: str
    version: str
    build: str | None = None
    tags: tuple[str, ...] = ()
    source: str | None = None
    record_sha256: str | None = None
    content_sha256: str | None = None
    reason: str | None = None
    direct_url: DirectUrlTable | None = None
    wheel: WheelTable | None = None


@dataclass(frozen=True, kw_only=True)
class PackagesTable(LockTable):
    """[packages]: every installed distribution; `env-digest` is their hpcenv-env-v1 root."""

    count: int
    env_digest: str
    content_digest: str | None = None
    conda_count: int | None = None
    conda_digest: str | None = None
    unlisted_count: int
    unlisted_digest: str
    dist: tuple[DistTable, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HostTable(LockTable):
    """[host]: what the nodes must offer; expectations, not identity.

    Attributes:
        driver_min: oldest driver that runs the locked CUDA build.
        gpu: the GPU that this was locked for, as hpcenv.toml names it.
        nvidia_require: rules of the image (NVIDIA_REQUIRE_*), checked on every node.
    """

    driver_min: str | None = None
    gpu: str | None = None
    nvidia_require: dict[str, str] = declared(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DeterminismTable(LockTable):
    """[determinism]: which profile decides how strict the comparison is."""

    profile: Profile = "default"


@dataclass(frozen=True, kw_only=True)
class CodeTable(LockTable):
    """[code]: state of the code, in the lockfile copy of a run."""

    commit: str | None = None
    dirty: bool | None = None
    diff_sha256: str | None = None
    script_sha256: str
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunTable(LockTable):
    """[run]: command and shape, in the lockfile copy of a run."""

    argv: tuple[str, ...] = ()
    nodes: int
    gpus_per_node: int
    nproc_per_node: int
    backend: str
    env: dict[str, str] = declared(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lockfile(LockTable):
    """A lockfile as a whole.

    Attributes:
        facts: every other field by its dotted name: `python.version`, `torch.version`,
            `libs.nccl.version`, `system.glibc` and so on, as the probe reported them. In
            the file they stand in tables: [python], [torch], [libs.nccl], [system].
        unknown: field -> why it could not be read when this was locked.
        policy: overrides of severities, copied from hpcenv.toml so that loosening shows.
    """

    schema_: int
    revision: int = 0
    generated_by: str
    fingerprint: str
    kind: Literal["sif", "host"]
    asked: AskedTable
    container: ContainerTable | None = None
    facts: dict[str, str | int | tuple[str, ...]] = declared(default_factory=dict)
    packages: PackagesTable
    host: HostTable = declared(default_factory=HostTable)
    determinism: DeterminismTable = declared(default_factory=DeterminismTable)
    code: CodeTable | None = None
    run: RunTable | None = None
    unknown: dict[str, str] = declared(default_factory=dict)
    policy: dict[str, Severity] = declared(default_factory=dict)

    def check(self) -> None:
        """A file that was cut or edited must not weaken the gate unseen."""
        if (self.kind == "sif") != (self.container is not None):
            raise ValueError(f"kind is {self.kind!r}, but [container] is {'there' if self.container else 'missing'}")
        if (self.kind == "host") != (self.asked.image == "host"):
            raise ValueError(f"kind is {self.kind!r}, but asked.image is {self.asked.image!r}")
        missing = [field for field in REQUIRED if field in _FACT_FIELDS and field not in self.facts]
        if missing:
            raise ValueError(f"`{missing[0]}` is missing")
        if self.packages.count != len(self.packages.dist):
            raise ValueError(f"packages.count is {self.packages.count}, but {len(self.packages.dist)} are listed")
        for field in self.facts:
            parents = {field.rsplit(".", n)[0] for n in range(1, field.count(".") + 1)}
            if not parents or parents & self.facts.keys():
                raise ValueError(f"`{field}` is no fact: a table and a value have one name")


# What a job cannot do without whoever locked it: these must have been read for a lockfile
# to be written at all.
REQUIRED = ("python.version", "packages.env-digest", "torch.version")

# Top-level tables that hold facts as the probe named them.
FACT_TABLES = ("python", "torch", "libs", "loaded", "system")
_FACT_FIELDS = tuple(field for field in REQUIRED if field.split(".", maxsplit=1)[0] in FACT_TABLES)

# Facts that name a place on one machine: not part of an environment's identity.
NOT_LOCKED = ("python.executable", "python.prefix")

# Who wrote it, its own name, and what belongs to one run: not what the environment is.
_NOT_COVERED = ("generated-by", "fingerprint", "revision", "code", "run")


def fingerprint(lockfile: dict[str, Any]) -> str:
    """Return the short name of what is locked, for a paper's appendix.

    It covers everything but who wrote the file and what belongs to one run: `hpc1-` and 12
    hex digits of the sha256 over canonical JSON (sorted keys, no blanks, no empty tables,
    UTF-8).
    """
    covered = _without_empty_tables({k: v for k, v in lockfile.items() if k not in _NOT_COVERED})
    packages = covered.get("packages", {})
    # Which wheel a package came from was found out elsewhere, with whatever index answered.
    dists = [{k: v for k, v in dist.items() if k != "wheel"} for dist in packages.get("dist", ())]
    covered["packages"] = {**packages, "dist": dists}
    text = json.dumps(covered, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return "hpc1-" + hashlib.sha256(text.encode()).hexdigest()[:12]


_LAST_TABLES = ("host", "determinism", "code", "run", "unknown", "policy", "packages")


def to_data(lockfile: Lockfile) -> dict[str, Any]:
    """Return the lockfile as plain data in canonical order, ready for a TOML writer.

    What is at its default is left out: a lockfile from before a key existed keeps its
    fingerprint.
    """
    said = document.plain(lockfile, defaults=False)
    data: dict[str, Any] = {"schema": lockfile.schema_, "revision": lockfile.revision} | said
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
    """Return `data` without what says nothing."""
    kept = {k: _without_empty_tables(v) if isinstance(v, dict) else v for k, v in data.items()}
    return {key: value for key, value in kept.items() if value != {}}


def from_data(data: dict[str, Any]) -> dict[str, Any]:
    """Return the model's shape of a parsed lockfile: fact tables become dotted fields."""
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


def arch_list_of(lockfile: Lockfile) -> tuple[str, ...]:
    """Return the GPU architectures that the locked torch has kernels for; empty when unknown."""
    found = lockfile.facts.get("torch.arch-list")
    return found if isinstance(found, tuple) else ()


def policy_problems(lockfile: Lockfile) -> tuple[str, ...]:
    """Say which fields of [policy] this environment has not, with the nearest that it has.

    A misspelled field would loosen or tighten nothing, unseen.
    """
    return fields.policy_problems(lockfile.policy, lockfile.facts)


def severity_of(field: str, policy: Mapping[str, Severity], profile: Profile = "default") -> Severity | None:
    """Return how much `field` matters, None when it is not compared."""
    return policy.get(field, fields.severity(field, profile))


def expectations(lockfile: Lockfile, *, level: Level, origin: str) -> tuple[Expectation, ...]:
    """Flatten the lockfile into what every node is compared with.

    Args:
        level: how deep the nodes look; fields that need more are left out.
        origin: path of the lockfile, for messages.
    """
    locked: dict[str, Value] = dict(lockfile.facts)
    if lockfile.container is not None:
        locked["container.sif.sha256"] = lockfile.container.sif.sha256
    packages = document.plain(lockfile.packages, "dist")
    locked |= {f"packages.{key}": value for key, value in packages.items()}
    for dist in lockfile.packages.dist:
        sources = source_fields(dist.direct_url).items()
        locked |= {f"packages.{dist.name}.{part}": value for part, value in sources}
    found = []
    for field in sorted(locked):
        severity = severity_of(field, lockfile.policy, lockfile.determinism.profile)
        if severity is None or not _readable_at(field, level):
            continue
        note = _unlisted_note(lockfile) if field == "packages.unlisted-digest" else ""
        found.append(Expectation(field=field, value=locked[field], severity=severity, origin=origin, note=note))
    return (*found, *_unknown_expectations(lockfile, level=level, origin=origin))


def source_fields(direct_url: DirectUrlTable | None) -> dict[str, Value]:
    """Return what is compared of where a distribution came from."""
    if direct_url is None:
        return {}
    told = {
        "commit-id": direct_url.commit_id or None,
        "dirty": direct_url.dirty,
        "diff-sha256": direct_url.diff_sha256,
        "files-sha256": direct_url.files_sha256,
    }
    return {part: value for part, value in told.items() if value is not None}


def _unlisted_note(lockfile: Lockfile) -> str:
    count = lockfile.packages.unlisted_count
    return f"{count or 'no'} such {'file' if count == 1 else 'files'} when it was locked"


# Stands for the value of a field that could not be read when the environment was locked.
UNKNOWN_WHEN_LOCKED = "unknown when it was locked"


def _unknown_expectations(lockfile: Lockfile, *, level: Level, origin: str) -> tuple[Expectation, ...]:
    """Let every node say that it was not compared in what the lockfile does not know."""
    compared = [
        field
        for field in sorted(lockfile.unknown)
        if severity_of(field, lockfile.policy, lockfile.determinism.profile) in ("must", "warn")
        and _readable_at(field, level)
    ]
    return tuple(
        Expectation(field=field, value=UNKNOWN_WHEN_LOCKED, severity="warn", origin=origin) for field in compared
    )


def _readable_at(field: str, level: Level) -> bool:
    known = fields.find(field)
    return known is None or LEVELS.index(known.level) <= LEVELS.index(level)


def package_expectations(lockfile: Lockfile) -> tuple[PackageExpectation, ...]:
    """Return the locked distributions in the form the nodes compare."""
    return tuple(
        PackageExpectation(
            name=dist.name,
            version=dist.version,
            record_sha256=dist.record_sha256 or "",
            # Only a distribution that was modified when it was locked has a content digest
            # of its own; otherwise the content is what RECORD says.
            content_sha256=dist.content_sha256 or dist.record_sha256 or "",
        )
        for dist in lockfile.packages.dist
    )
