"""Typed classes with one attribute for each row of options.py.

Written by `scripts/reference-docs`; do not edit. Runs on: LOGIN NODE.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypedDict

from hpcenv.project.document import Document
from hpcenv.project.gone_options import GONE_KEYS
from hpcenv.project.option_values import Count, CountOrNone, Seconds, Size, Text, Time, Word


@dataclass(frozen=True, kw_only=True)
class OptionValues:
    """The values of all options, as hpcenv keeps them. A base class."""

    nodes: int | None = None
    gpus: int | None = None
    allow_cpu_torch: bool = False
    gpu_type: str | None = None
    gpu_request: Literal["gpus-per-node", "gres"] | None = None
    nproc: int | None = None
    cpus: int | None = None
    mem: str | None = None
    spare: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    dependency: str | None = None
    after: tuple[str, ...] = ()
    comment: str | None = None
    sbatch: Mapping[str, str | None] = field(default_factory=dict)
    srun: Mapping[str, str | None] = field(default_factory=dict)
    retry_excluding: int | None = None
    site: str | None = None
    cluster: Literal["slurm", "local"] | None = None
    assume_shared: bool = False
    module: bool = False
    entry: bool = False
    launcher: Literal["torchrun", "srun", "none", "ray"] | None = None
    cpu_binding: Literal["near-gpu", "off"] | None = None
    expand: bool = False
    torchrun_args: tuple[str, ...] = ()
    rocm: bool = False
    lock: str = "default"
    frozen: bool = False
    runtime: str | None = None
    bind: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    pass_env: tuple[str, ...] = ()
    secret: Mapping[str, str] = field(default_factory=dict)
    setup: tuple[str, ...] = ()
    preflight: Literal["quick", "full", "off"] | None = None
    skip_check: tuple[str, ...] = ()
    determinism: Literal["off", "seeded", "bitwise"] | None = None
    seed: int | None = None
    hash_parameters_every: int | None = None
    record_metrics: bool = True
    trace_steps: str | None = None
    stop_after_steps: int | None = None
    grace: int | None = None
    idle_end: int | None = None
    stop_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    requeue: Literal["saved", "always", "never"] | None = None
    max_requeues: int | None = None
    resume_from: str | None = None
    workdir: Literal["copy", "live"] | None = None
    include: tuple[str, ...] = ()
    allow_dirty: bool = False
    sweep: tuple[str, ...] = ()
    array: str | None = None
    max_parallel: int | None = None
    chain: int | None = None
    stage: bool = False
    stage_data: tuple[str, ...] = ()
    stage_dir: str | None = None
    stage_limit: int | None = None
    name: str | None = None
    runs_dir: str | None = None


@dataclass(frozen=True, kw_only=True)
class WrittenOptions:
    """The options whose values are written unchanged into `#SBATCH` lines. A base class."""

    mem: str | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    dependency: str | None = None


class SubmitTable(Document):
    """[submit] of hpcenv.toml: defaults for submissions."""

    replaced: ClassVar[Mapping[str, str]] = GONE_KEYS

    nodes: Count | None = None
    gpus: CountOrNone | None = None
    gpu_type: Word | None = None
    gpu_request: Literal["gpus-per-node", "gres"] | None = None
    nproc: Count | None = None
    cpus: Count | None = None
    mem: Word | None = None
    spare: CountOrNone | None = None
    time: Time | None = None
    partition: Word | None = None
    account: Word | None = None
    qos: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None
    exclude: Word | None = None
    nodelist: Word | None = None
    dependency: Word | None = None
    comment: Text | None = None
    assume_shared: bool = False
    launcher: Literal["torchrun", "srun", "none", "ray"] | None = None
    cpu_binding: Literal["near-gpu", "off"] | None = None
    rocm: bool = False
    runtime: Text | None = None
    pass_env: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    preflight: Literal["quick", "full", "off"] | None = None
    skip_check: tuple[str, ...] = ()
    record_metrics: bool = True
    grace: Seconds | None = None
    idle_end: Seconds | None = None
    stop_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"] | None = None
    requeue: Literal["saved", "always", "never"] | None = None
    max_requeues: CountOrNone | None = None
    workdir: Literal["copy", "live"] | None = None
    include: tuple[str, ...] = ()
    stage_limit: Size | None = None


class SubmitKeywords(TypedDict, total=False):
    """The keywords of `hpcenv.submit()` and `hpcenv.plan_job()`: the options of `hpcenv submit`."""

    nodes: int
    gpus: int
    allow_cpu_torch: bool
    gpu_type: str
    nproc: int
    cpus: int
    mem: str
    spare: int
    time: str | int
    partition: str
    account: str
    qos: str
    constraint: str
    reservation: str
    exclude: str
    nodelist: str
    dependency: str
    after: Sequence[str]
    comment: str
    sbatch: Mapping[str, str | int | bool | None]
    srun: Mapping[str, str | int | bool | None]
    retry_excluding: int
    site: str
    cluster: Literal["slurm", "local"]
    module: bool
    entry: bool
    launcher: Literal["torchrun", "srun", "none", "ray"]
    cpu_binding: Literal["near-gpu", "off"]
    expand: bool
    torchrun_args: Sequence[str]
    rocm: bool
    lock: str
    frozen: bool
    runtime: str
    bind: Sequence[str]
    env: Mapping[str, str]
    pass_env: Sequence[str]
    secret: Mapping[str, str]
    setup: Sequence[str]
    preflight: Literal["quick", "full", "off"]
    skip_check: Sequence[str]
    determinism: Literal["off", "seeded", "bitwise"]
    seed: int
    hash_parameters_every: int
    record_metrics: bool
    trace_steps: str
    stop_after_steps: int
    grace: str | int
    idle_end: str | int
    stop_signal: Literal["USR1", "USR2", "TERM", "INT", "HUP"]
    requeue: Literal["saved", "always", "never"]
    resume_from: str
    workdir: Literal["copy", "live"]
    include: Sequence[str]
    allow_dirty: bool
    chain: int
    stage: bool
    stage_data: Sequence[str]
    stage_dir: str
    name: str
    runs_dir: str
