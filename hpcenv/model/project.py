"""hpcenv.toml: what the user asks for.

Runs on: LOGIN NODE.
"""

import re
from typing import Annotated, Literal

from hpcenv.dataclass import dataclass, field
from hpcenv.model.document import Check, Document
from hpcenv.model.fields import Profile, policy_problems
from hpcenv.wire import Severity

HOST = "host"

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Where a secret is read from on the nodes; the value itself is written nowhere.
SECRET_SOURCE = re.compile(r"file:[^\0\n]+|env:[A-Za-z_][A-Za-z0-9_]*")


def _one_line(value: str) -> str:
    # These words end up in `#SBATCH` lines, where a newline would start a new directive
    # and a blank or quote is read by sbatch's own parser, not by a shell.
    if not re.fullmatch(r"[^\s\"'\\]+", value):
        raise ValueError("must be one word without blanks, quotes or backslashes")
    return value


def _positive(value: int) -> int:
    if value < 1:
        raise ValueError("must be at least 1")
    return value


def _not_negative(value: int) -> int:
    if value < 0:
        raise ValueError("must not be negative")
    return value


def _variable_names(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not _VARIABLE.match(name):
            raise ValueError(f"{name!r} is not a variable name")
        if "\0" in text:
            raise ValueError(f"the value of {name} holds a NUL byte")
    return value


def _secrets(value: dict[str, str]) -> dict[str, str]:
    for name, source in _variable_names(value).items():
        if not SECRET_SOURCE.fullmatch(source):
            raise ValueError(f"the source of {name} must be `file:PATH` or `env:NAME`, never the value itself")
    return value


def _fields(value: dict[str, Severity]) -> dict[str, Severity]:
    # A misspelled field would loosen or tighten nothing, unseen.
    problems = policy_problems(value)
    if problems:
        raise ValueError("; ".join(problems))
    return value


def _time(value: str) -> str:
    if time_minutes(value) is None:
        raise ValueError("is not a Slurm time: minutes, [hours:]minutes:seconds or days-hours[:minutes[:seconds]]")
    return value


def _text(value: str) -> str:
    if not value:
        raise ValueError("must not be empty")
    if "\0" in value:
        raise ValueError("must not hold a NUL byte")
    return value


def _absolute(value: str) -> str:
    if not _text(value).startswith("/"):
        raise ValueError("must be an absolute path in the container")
    return value


Text = Annotated[str, Check(_text)]
Word = Annotated[str, Check(_one_line)]
Count = Annotated[int, Check(_positive)]
CountOrNone = Annotated[int, Check(_not_negative)]
Time = Annotated[str, Check(_time)]


def time_minutes(value: str) -> float | None:
    """Return a Slurm time limit in minutes, or None if it is not one.

    Forms as in sbatch(1), option --time (Slurm 24.11): `minutes`, `minutes:seconds`,
    `hours:minutes:seconds`, `days-hours`, `days-hours:minutes`, `days-hours:minutes:seconds`.
    More than nine digits are no time of Slurm's, which counts minutes in 32 bits.
    """
    match = re.fullmatch(r"(?:([0-9]{1,9})-)?([0-9]{1,9})(?::([0-9]{1,9}))?(?::([0-9]{1,9}))?", value)
    if match is None:
        return None
    days, *rest = match.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        return int(days) * 1440 + hours * 60 + minutes + seconds / 60
    if len(parts) == 1:
        return float(parts[0])
    if len(parts) == 2:
        return parts[0] + parts[1] / 60
    return parts[0] * 60 + parts[1] + parts[2] / 60


@dataclass(frozen=True, kw_only=True)
class SubmitTable(Document):
    """[submit]: defaults for `hpcenv submit`; every flag wins over its key."""

    nodes: Count | None = None
    gpus: CountOrNone | None = None
    nproc: Count | None = None
    cpus: Count | None = None
    mem: Word | None = None
    time: Time | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    nodelist: Word | None = None
    dependency: Word | None = None
    spare: CountOrNone | None = None
    gpu_request: Literal["gpus-per-node", "gres"] | None = None
    gpu_type: Word | None = None
    grace: CountOrNone | None = None
    stop_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    requeue: Literal["saved", "always", "never"] | None = None
    max_requeues: CountOrNone | None = None
    pass_env: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class BindTable(Document):
    """[[bind]]: a host folder that the container sees."""

    source: Text
    target: Annotated[str, Check(_absolute)] | None = None
    read_only: bool = False


@dataclass(frozen=True, kw_only=True)
class HostTable(Document):
    """[host]: what the nodes have; lets a mismatch be said before the job waits.

    Attributes:
        gpu: the partition's GPU, as Slurm or NVIDIA names it: `h100`, `a100` ...
    """

    gpu: Word | None = None


@dataclass(frozen=True, kw_only=True)
class DeterminismTable(Document):
    """[determinism]: how strict nodes and runs are compared."""

    profile: Profile = "default"


@dataclass(frozen=True, kw_only=True)
class PathsTable(Document):
    """[paths]: where things go, relative to the folder of hpcenv.toml.

    Attributes:
        store: blobs and SIFs, for all projects that name the same folder.
        store_shared: the folder's group may write to it, and is trusted.
    """

    runs: Text = "runs"
    store: Text | None = None
    store_shared: bool = False
    lockfiles: Text = "lockfiles"


@dataclass(frozen=True, kw_only=True)
class Project(Document):
    """hpcenv.toml as a whole.

    Attributes:
        image: `docker://HOST/NAME:TAG`, `oci:DIR`, `oci-archive:FILE`, `docker-archive:FILE`,
            a SIF, a definition file, or `host`.
        python: the interpreter: a path (host) or a name inside the image.
        platform: which image of a multi-platform index.
        allow_floating: accept `latest` or no tag.
        plain_http: registries (`HOST:PORT`) that are spoken to without TLS.
        ca_file: certificates of the authorities to trust, for registries with their own.
        policy: field -> severity, loosening or tightening the gate; recorded in the lockfile.
    """

    image: Text
    python: Text | None = None
    platform: str = "linux/amd64"
    allow_floating: bool = False
    plain_http: tuple[str, ...] = ()
    ca_file: Text | None = None
    submit: SubmitTable = field(default_factory=SubmitTable)
    site: Text | None = None
    env: Annotated[dict[str, str], Check(_variable_names)] = field(default_factory=dict)
    secrets: Annotated[dict[str, str], Check(_secrets)] = field(default_factory=dict)
    bind: tuple[BindTable, ...] = ()
    host: HostTable = field(default_factory=HostTable)
    determinism: DeterminismTable = field(default_factory=DeterminismTable)
    paths: PathsTable = field(default_factory=PathsTable)
    policy: Annotated[dict[str, Severity], Check(_fields)] = field(default_factory=dict)

    @property
    def on_host(self) -> bool:
        """Whether no container is used."""
        return self.image == HOST


TEMPLATE = """\
# hpcenv.toml: what this project asks for. `hpcenv lock` turns it into a lockfile.

# The container image, with a tag or a digest that does not float:
#   image = "docker://ghcr.io/OWNER/NAME:TAG"
# or "host": no container; the Python environment of this machine is locked instead.
image = "{image}"

# The interpreter: a path (image = "host"; default: the active virtual environment), or a
# name inside the image (default: python3).
{python}

# Registries that are spoken to without TLS, as HOST:PORT.
{plain_http}

# Defaults for `hpcenv submit`; every flag wins over its key here.
[submit]
# nodes = 2              # --nodes
# gpus = 8               # --gpus: GPUs PER NODE
# cpus = 64              # --cpus: CPUs per node
# time = "04:00:00"      # --time
# partition = "gpu"      # --partition
# account = "my-project" # --account
# gpu-request = "gres"   # how this cluster wants GPUs asked for: gpus-per-node or gres
# gpu-type = "h100"      # --gpu-type: as sinfo --format=%G names it, where there are several

# Variables for the ranks, literal; they win over whatever hpcenv detects.
[env]
# NCCL_DEBUG = "INFO"

# Folders of the host that the container sees besides the project and the run folder.
# [[bind]]
# source = "/scratch/datasets"
# target = "/data"
# read-only = true

# What the nodes have: lets hpcenv say before the queue that torch has no kernels for it.
[host]
# gpu = "h100"

# bitwise: also compare builds of libraries, GPU models and NCCL settings.
[determinism]
# profile = "bitwise"

# Loosen or tighten single checks: must, warn or info. Recorded in the lockfile.
[policy]
# "system.glibc" = "must"
"""
