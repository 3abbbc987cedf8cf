"""The record of a request: the options of a submission. With this record, `hpcenv rerun` submits the same run again.

Runs on: LOGIN NODE.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """The request of one submission (`request.json`). The login node writes this file once.

    The record contains what the user typed, without additions from hpcenv.toml, the environment and the site profile.
    For secrets it contains the sources, never the values.

    Attributes:
        script: path of the script, relative to the folder of the submission.
        args: arguments of the script.
        options: name in the table of options -> value, for the options that the user gave.
    """

    schema: int
    script: str
    args: tuple[str, ...]
    options: dict[str, str | int | bool | tuple[str, ...] | dict[str, str | None]]
