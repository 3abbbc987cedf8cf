"""hpcenv.toml: the image, the defaults for submissions and the settings of a project.

Runs on: LOGIN NODE.
"""

import os
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from hpcenv.errors import UsageError
from hpcenv.project import hub_reference, severities
from hpcenv.project.document import Document
from hpcenv.project.option_types import SubmitTable
from hpcenv.project.option_values import (
    CountOrNone,
    SbatchTable,
    SrunTable,
    Text,
    Word,
    memory,
    seconds,
    text,
    variables,
)
from hpcenv.project.option_values import secrets as secret_sources
from hpcenv.records.manifest import DataCompare, DeterminismProfile, OnStall, Severity, WatchOptions

HOST = "host"
DEFAULT_LOCK = "default"
LOCKFILE_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


def _fields(value: dict[str, Severity]) -> dict[str, Severity]:
    # If hpcenv accepted a key without an effect, the user would not notice the mistake.
    problems = severities.problems(value)
    if problems:
        raise ValueError("; ".join(problems))
    return value


def _absolute(value: str) -> str:
    if not text(value).startswith("/"):
        raise ValueError("must be an absolute path in the container")
    return value


def _overlay(value: str) -> str:
    path, target = split_overlay(text(value))
    if not path:
        raise ValueError("the form is PATH or PATH:TARGET")
    if target is not None and (os.path.normpath(target) == "/" or _NOT_A_TARGET.match(os.path.normpath(target) + "/")):
        raise ValueError(f"nothing can be mounted at `{target}`")
    return value


# The container runtime or hpcenv mounts these itself.
_NOT_A_TARGET = re.compile(r"//?(proc|sys|dev|tmp|hpcenv)/")


def split_overlay(value: str) -> tuple[str, str | None]:
    """Return path and target of an overlay; `PATH:TARGET` splits at the last `:` before a `/`."""
    path, colon, target = value.rpartition(":/")
    return (path, f"/{target}") if colon else (value, None)


class BindTable(Document):
    """[[bind]]: a host folder that the container sees.

    Attributes:
        source, target: path on the nodes, and path in the container. Without `target`, both paths are the same.
        read_only: whether programs in the container can only read it.
    """

    source: Text
    target: Annotated[str, AfterValidator(_absolute)] | None = None
    read_only: bool = False


def _inside(value: str) -> str:
    parts = text(value).rstrip("/").split("/")
    if value.startswith(("/", "~")) or not {"", ".", ".."}.isdisjoint(parts):
        raise ValueError("must be a folder below that of hpcenv.toml, for example outputs")
    return "/".join(parts)


class CodeFilesTable(Document):
    """[code]: changes to the default content of a run's own copy of the project.

    Attributes:
        live: folders in the project itself that the ranks write to.
        ignore: patterns of files and folders that the copy leaves out.
    """

    live: tuple[Annotated[str, AfterValidator(_inside)], ...] = ()
    ignore: tuple[Text, ...] = ()


def _hub(value: str) -> str:
    return str(hub_reference.parse_locked(value))


class DataTable(Document):
    """[[data]]: a file or folder that the script reads. hpcenv records it at submission and checks it on the nodes.

    Attributes:
        path: absolute, or relative to the folder of hpcenv.toml.
        hub: a repository of a hub at a commit, in place of `path`. `ORG/NAME@COMMIT` is a model. `datasets/` or
            `spaces/` before the name is for a data set or a space. `hpcenv data fetch` downloads the files.
        files: patterns of files in the repository. Without patterns, all files are taken.
        compare: what the nodes compare: the content of all files, their sizes and times, or a list of names and sizes.
    """

    path: Text | None = None
    hub: Annotated[str, AfterValidator(_hub)] | None = None
    files: tuple[Text, ...] = ()
    compare: DataCompare = "size-and-time"


def _one_place(value: tuple[DataTable, ...]) -> tuple[DataTable, ...]:
    named: set[str] = set()
    for one in value:
        if one.hub is not None and one.hub in named:
            # The cache of a run has only one folder for each commit.
            raise ValueError(f"two [[data]] name `{one.hub}`; write the patterns of both into `files` of one of them")
        named |= {one.hub or ""}
        if (one.path is None) == (one.hub is None):
            raise ValueError('each [[data]] needs one of the two: `path`, or `hub = "ORG/NAME@COMMIT"`')
        if one.files and one.hub is None:
            raise ValueError(f"`files` is for a repository of a hub; `{one.path}` is read as a whole")
    return value


class HostTable(Document):
    """[host]: what the nodes have. With this table, hpcenv finds a mismatch before the job waits in the queue.

    Attributes:
        gpu: the partition's GPU, as Slurm or NVIDIA names it: `h100`, `a100` ...
        gpu_memory: the least memory of each GPU, as data sheets name it: `40 GB` is 40 * 10^9 bytes.
    """

    gpu: Word | None = None
    gpu_memory: Annotated[str, AfterValidator(memory)] | None = None


class DeterminismTable(Document):
    """[determinism]: how strictly runs must repeat, and how strictly nodes and runs are compared.

    Attributes:
        profile: `off`, `seeded` or `bitwise`. `seeded` means seeds and deterministic kernels, with a warning if torch
            has no deterministic kernel for an operation. `bitwise` means that such an operation is an error.
        seed: base seed of the ranks. With the profile `off`, the ranks get seeds, but their kernels do not change.
        hash_parameters_every: hash the parameters after each N-th optimizer step; 0 for never.
    """

    profile: DeterminismProfile = "off"
    seed: CountOrNone = 0
    hash_parameters_every: CountOrNone = 0


class ReproduceTable(Document):
    """[reproduce]: how another person repeats a run with less hardware.

    Attributes:
        one_node: additional arguments of the script on one node, which keep the global batch the same. `{factor}` is
            the number of ranks of the run, divided by the number of ranks on the one node.
    """

    one_node: tuple[Text, ...] = ()


def _off_or_seconds(value: str | int) -> int:
    return 0 if value == "off" else max(1, seconds(value))


def _auto_or_seconds(value: str | int) -> int:
    return 0 if value == "auto" else max(1, seconds(value))


class WatchTable(Document):
    """[watch]: what each node measures while its ranks run.

    Attributes:
        sample: how often GPUs, node and ranks are measured; `off` for never.
        stall_after: hpcenv checks a rank that has made no optimizer step for this time. `auto` is 10 times the median
            time of its steps, and at least 5 minutes.
        on_stall: what to do if the ranks hang. `report` only reports it, `stop` ends the job, and `requeue` also queues
            the job again.
    """

    sample: Annotated[str | int, AfterValidator(_off_or_seconds)] = 10
    stall_after: Annotated[str | int, AfterValidator(_auto_or_seconds)] = 0
    on_stall: OnStall = "report"

    def options(self, prometheus: str, *, idle_end: int) -> WatchOptions | None:
        """Return what the nodes measure; None if nothing is watched.

        Args:
            prometheus: folder of the site for the newest sample; empty without such a folder.
            idle_end: seconds without use of any GPU and CPU, after which the run ends; 0 for never.

        Raises:
            UsageError: an option needs measurements, but nothing is measured.
        """
        off = '`sample = "off"` under [watch] in hpcenv.toml'
        if not self.sample and idle_end:
            hint = "leave out `sample`, or give --idle-end 0"
            raise UsageError("--idle-end needs samples", why=off, hint=hint)
        for name, given in (("on-stall", self.on_stall != "report"), ("stall-after", self.stall_after)):
            if not self.sample and given:
                hint = f"leave out `sample`, or `{name}`"
                raise UsageError(f"`{name}` under [watch] needs samples", why=off, hint=hint)
        if not self.sample:
            return None
        return WatchOptions(
            sample=float(self.sample),
            stall_after=float(self.stall_after),
            on_stall=self.on_stall,
            idle_end=float(idle_end),
            prometheus=prometheus,
        )


class PathsTable(Document):
    """[paths]: folders for runs, lockfiles and images, relative to the folder of hpcenv.toml.

    Attributes:
        runs, lockfiles: folders of the project for runs and lockfiles.
        store: folder for blobs and SIFs. Projects that name the same folder share its blobs and SIFs.
        store_shared: whether the group of the store's folder may write to the store. hpcenv then trusts this group.
    """

    runs: Text = "runs"
    store: Text | None = None
    store_shared: bool = False
    lockfiles: Text = "lockfiles"


class EnvironmentTable(Document):
    """[environment.NAME]: another environment of the project, locked as lockfiles/NAME.lock.toml.

    Attributes:
        image: replaces the `image` at the top of the file. With an `image` here, the `python` and the `overlay` at the
            top are not used, because they belong to the image at the top.
        overlay: replaces the `overlay` at the top.
        python, platform, allow_floating: replace the values of the same keys at the top.
        env: variables in addition to [env]; they replace variables with the same name.
        bind: folders in addition to [[bind]].
        policy: severities in addition to [policy]; they replace severities of the same field.
    """

    image: Text | None = None
    overlay: Annotated[str, AfterValidator(_overlay)] | None = None
    python: Text | None = None
    platform: Text | None = None
    allow_floating: bool | None = None
    env: Annotated[dict[str, str], AfterValidator(variables)] = {}
    bind: tuple[BindTable, ...] = ()
    policy: Annotated[dict[str, Severity], AfterValidator(_fields)] = {}


def _environment_names(value: dict[str, EnvironmentTable]) -> dict[str, EnvironmentTable]:
    for name in value:
        if name == DEFAULT_LOCK:
            raise ValueError(f"`{name}` is the environment at the top of the file: write its keys there")
        if not re.fullmatch(LOCKFILE_NAME, name):
            raise ValueError(f"`{name}` is not a name for a lockfile: use letters, digits, '.', '_' and '-'")
    return value


class Project(Document):
    """The whole file hpcenv.toml.

    Attributes:
        image: `docker://HOST/NAME:TAG`, `oci:DIR`, `oci-archive:FILE`, `docker-archive:FILE`,
            `oras://HOST/NAME:TAG`, a SIF, a definition file, or `host`.
        overlay: `PATH:TARGET`: a squashfs with packages, mounted read-only at a path of the container.
        python: the interpreter: a path (host) or a name inside the image.
        platform: the platform of the image, if an index has images for several platforms.
        allow_floating: whether to accept an image with the tag `latest` or without a tag.
        plain_http: registries (`HOST:PORT`) that are used without TLS.
        ca_file: CA certificates to trust, for registries with a private CA.
        submit: defaults for `hpcenv submit`.
        sbatch, srun: options that are passed on to sbatch and srun.
        site: name or path of the site profile. Without `site`, the profile that fits this cluster is used.
        env: variables for the ranks, as literal text. These variables override what hpcenv detects.
        secrets: secret variables for the ranks: file:PATH or env:VARIABLE. Only the nodes read the values.
        policy: field -> severity in the gate. The lockfile records this severity.
        environment: name of a lockfile -> the values for this environment, which replace the values here.
    """

    replaced: ClassVar[Mapping[str, str]] = {
        "cosign-key": "hpcenv verifies no signatures; remove the key, and before `hpcenv lock` type "
        "`cosign verify --key cosign.pub IMAGE@sha256:...`",
    }

    image: Text
    overlay: Annotated[str, AfterValidator(_overlay)] | None = None
    python: Text | None = None
    platform: str = "linux/amd64"
    allow_floating: bool = False
    plain_http: tuple[str, ...] = ()
    ca_file: Text | None = None
    submit: SubmitTable = SubmitTable()
    sbatch: SbatchTable = {}
    srun: SrunTable = {}
    site: Text | None = None
    env: Annotated[dict[str, str], AfterValidator(variables)] = {}
    secrets: Annotated[dict[str, str], AfterValidator(secret_sources)] = {}
    bind: tuple[BindTable, ...] = ()
    code: CodeFilesTable = CodeFilesTable()
    data: Annotated[tuple[DataTable, ...], AfterValidator(_one_place)] = ()
    host: HostTable = HostTable()
    determinism: DeterminismTable = DeterminismTable()
    reproduce: ReproduceTable = ReproduceTable()
    paths: PathsTable = PathsTable()
    watch: WatchTable = WatchTable()
    policy: Annotated[dict[str, Severity], AfterValidator(_fields)] = {}
    environment: Annotated[dict[str, EnvironmentTable], AfterValidator(_environment_names)] = {}

    def for_lock(self, name: str) -> "Project":
        """Return the project as the lockfile `name` needs it, with the values of [environment.NAME]."""
        table = self.environment.get(name)
        if table is None:
            return self.model_copy(update={"environment": {}})
        kept, overlay = (self.python, self.overlay) if table.image is None else (None, None)
        return self.model_copy(
            update={
                "image": table.image or self.image,
                "overlay": table.overlay or overlay,
                "python": table.python or kept,
                "platform": table.platform or self.platform,
                "allow_floating": self.allow_floating if table.allow_floating is None else table.allow_floating,
                "env": {**self.env, **table.env},
                "bind": (*self.bind, *table.bind),
                "policy": {**self.policy, **table.policy},
                "environment": {},
            }
        )

    @property
    def on_host(self) -> bool:
        """Whether the ranks run on the host, without a container."""
        return self.image == HOST


TEMPLATE = """\
#:schema ./hpcenv.schema.json
# hpcenv.toml: what this project needs. `hpcenv lock` resolves it into a lockfile.

# The container image, with a fixed tag (not `latest`) or a digest:
#   image = "docker://ghcr.io/OWNER/NAME:TAG"
# With "host", there is no container, and the Python environment of this machine is locked.
image = "{image}"

# Additional packages: a squashfs, and the folder in the container where it is mounted, read-only.
# overlay = "venv.sqsh:/user-software"

# The Python interpreter. In an image, this is a name inside the image (default: python3).
# On the host, it is a path (default: the active virtual environment).
{python}

# Registries that are used without TLS, as HOST:PORT.
{plain_http}

# Defaults for `hpcenv submit`. An option on the command line overrides its key here.
[submit]
# nodes = 2              # --nodes
# gpus = 8               # --gpus: GPUs PER NODE
# cpus = 64              # --cpus: CPUs per node
# time = "04:00:00"      # --time
# partition = "gpu"      # --partition
# account = "my-project" # --account
# gpu-request = "gres"   # how this cluster accepts requests for GPUs: gpus-per-node or gres
# gpu-type = "h100"      # --gpu-type: as sinfo --format=%G names it, if there are several types

# Variables for the ranks, as literal text. They override the values that hpcenv detects.
[env]
# NCCL_DEBUG = "INFO"

# More folders of the host that the container sees. It always sees the project and the run folder.
# [[bind]]
# source = "/scratch/datasets"
# target = "/data"
# read-only = true

# A run works in its own copy of the project.
[code]
# live = ["outputs"]     # folders of the project itself that the run writes to
# ignore = ["wandb"]     # files and folders that the copy leaves out

# Data that the script reads. hpcenv records them at submission, and every node compares them before the training.
# [[data]]
# path = "/scratch/datasets/train"
# compare = "size-and-time" # or sha256 (reads everything), or list (names and sizes)

# A model or data set of a hub at a commit. `hpcenv data fetch` downloads it, so nodes need no network.
# [[data]]
# hub = "ORG/NAME@0000000000000000000000000000000000000000" # or datasets/...; see `hpcenv data resolve ORG/NAME`
# files = ["*.json", "*.safetensors"] # only these files

# The GPU of the nodes. If the locked torch has no kernels for this GPU, hpcenv refuses the run before the queue.
[host]
# gpu = "h100"
# gpu-memory = "40 GB"     # the minimum for each GPU, as data sheets name it

# seeded: seeds and deterministic kernels. bitwise: results repeat to the last bit, and hpcenv also compares the builds
# of libraries, the GPU models and the NCCL settings of the nodes.
[determinism]
# profile = "bitwise"    # --determinism
# seed = 1234            # --seed; without a profile, the ranks get seeds, but keep the fast kernels

# How another person repeats a run on one node (`hpcenv reproduce --rung 1`) with the same global batch.
[reproduce]
# one-node = ["--accumulate", "{{factor}}"]

# While the ranks run, each node measures its GPUs, memory, steps and waiting times, for `hpcenv top` and `report`.
[watch]
# sample = "10s"         # or "off"
# stall-after = "auto" # if a rank makes no optimizer step for this time, the stacks of all ranks are read
# on-stall = "report" # if the ranks hang; or "stop", or "requeue"

# Another environment of this project: `hpcenv lock --lock data` writes lockfiles/data.lock.toml, and
# `hpcenv submit prepare.py --lock data` uses it. It can also have python, platform, and the tables env, bind, policy.
# [environment.data]
# image = "docker://REGISTRY/OWNER/NAME:TAG"

# Changed severities of fields: must, warn or info. The lockfile records them.
# `hpcenv explain` lists the fields. `*` stands for one part of a name.
[policy]
# "system.glibc" = "must"
"""
