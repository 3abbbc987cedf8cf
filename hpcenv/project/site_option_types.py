"""The table [submit] of a site profile: one attribute for each row of options.py with this place.

Written by `scripts/reference-docs`; do not edit. Runs on: LOGIN NODE. Most submissions have no site profile, so this
table is not in option_types.py.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcenv.project.document import Document
from hpcenv.project.gone_options import GONE_KEYS
from hpcenv.project.option_values import Count, CountOrNone, Seconds, Text, Time, Word


class SiteSubmitTable(Document):
    """[submit] of a site profile: defaults."""

    replaced: ClassVar[Mapping[str, str]] = GONE_KEYS

    gpu_type: Word | None = None
    gpu_request: Literal["gpus-per-node", "gres"] | None = None
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
    comment: Text | None = None
    launcher: Literal["torchrun", "srun", "none", "ray"] | None = None
    cpu_binding: Literal["near-gpu", "off"] | None = None
    rocm: bool = False
    setup: tuple[str, ...] = ()
    preflight: Literal["quick", "full", "off"] | None = None
    skip_check: tuple[str, ...] = ()
    idle_end: Seconds | None = None
