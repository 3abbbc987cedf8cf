"""Run the probe inside an environment, and read its answer.

Runs on: COMPUTE NODE, and LOGIN NODE for `lock` and `verify`. The probe is the program of incontainer/probe.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcenv import process
from hpcenv.container import runtime
from hpcenv.container.start_command import build_start_command, opened
from hpcenv.errors import ToolFailed
from hpcenv.records.facts import CudaCompat, Look
from hpcenv.records.manifest import Bind, Environment, Value
from hpcenv.records.network import ImageNetwork


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The fields in a probe's answer, with the names that a lockfile uses.

    Attributes:
        values: field -> value.
        unknown: field -> why it could not be read.
        unlisted: the newest files that no package lists; see `records.facts.Facts`.
    """

    values: dict[str, Value]
    unknown: dict[str, str]
    unlisted: tuple[str, ...] = ()


def read_answer(answer: Mapping[str, Any]) -> Inside:
    """Return the answer of `parse_probe` as fields.

    Raises:
        ValueError: a value has a type that a lockfile cannot contain.
    """
    values = {name: _as_value(value) for name, value in answer["values"].items()}
    unknown = {name: str(reason) for name, reason in answer["unknown"].items()}
    for package in answer["packages"]:
        known, missing = _source(package)
        values.update(known)
        unknown.update(missing)
    newest = answer.get("unlisted-newest")
    return Inside(values=values, unknown=unknown, unlisted=tuple(str(name) for name in _texts(newest)))


def _source(package: Mapping[str, Any]) -> tuple[dict[str, Value], dict[str, str]]:
    """Return the source of a package that has no digest, as fields, and the reasons for unknown fields.

    With git, the fields are the commit, whether files differ from the commit, and a digest of the difference. Without
    git, the only field is the digest of the package's files.
    """
    tables = (package.get(name) for name in ("git", "direct-url", "files"))
    git, direct, files = (table if isinstance(table, dict) else {} for table in tables)
    parts = {
        "commit-id": (direct.get("commit-id") or git.get("commit"), git),
        "dirty": (git.get("dirty"), git),
        "diff-sha256": (git.get("diff-sha256"), git),
        "files-sha256": (files.get("sha256"), files),
    }
    values: dict[str, Value] = {}
    unknown: dict[str, str] = {}
    for part, (value, where) in parts.items():
        field = f"packages.{package['name']}.{part}"
        if isinstance(value, bool) or (isinstance(value, str) and value):
            values[field] = value
        elif where.get("reason"):
            unknown[field] = str(where["reason"])
    return values, unknown


# An unchecked .pyc (PEP 552) must not replace a module of the standard library in the probe. The probe itself reports
# such files.
_PROBE_OPTIONS = ("-B", "--check-hash-based-pycs", "always")


def _started(environment: Environment) -> list[str]:
    """Return the option that tells the probe which program was started.

    The started program may be a script that starts Python.
    """
    return ["--python", environment.python] if environment.kind == "host" else []


def _site(environment: Environment) -> list[str]:
    """Return the option with the folder of an overlay's packages, because the image's Python does not search it."""
    overlay = environment.overlay
    return ["--site", overlay.target] if overlay is not None and overlay.use == "packages" else []


def _since(since: int | None) -> list[str]:
    return [] if since is None else ["--since", str(since)]


def read_image_network(answer: Mapping[str, Any]) -> ImageNetwork | None:
    """Return the environment's libraries that NCCL would use, from the probe's answer; None if they are unknown."""
    found = answer.get("network")
    if not isinstance(found, dict) or not isinstance(found.get("unread"), list):
        return None
    count = found.get("providers")
    return ImageNetwork(
        verbs=str(found.get("verbs", "")),
        providers=count if isinstance(count, int) else 0,
        libfabric=str(found.get("libfabric", "")),
        plugin=str(found.get("plugin", "")),
        plugin_version=str(found.get("plugin-version", "")),
        other_plugins=tuple(str(name) for name in _texts(found.get("other-plugins"))),
        unread=tuple(str(name) for name in found["unread"]),
    )


def read_cuda_compat(answer: Mapping[str, Any]) -> CudaCompat | None:
    """Return the environment's package cuda-compat, from the probe's answer; None if it reports no such package."""
    found = answer.get("cuda-compat")
    if not isinstance(found, dict) or not isinstance(found.get("folder"), str):
        return None
    return CudaCompat(
        version=str(found.get("version", "")),
        folder=found["folder"],
        first=found.get("first") is True,
        library_path=str(found.get("library-path", "")),
    )


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def read_look(answer: Mapping[str, Any]) -> Look | None:
    """Return the state of the hashed files, from the probe's answer; None if the probe hashed no file."""
    look = answer.get("look")
    if not isinstance(look, dict):
        return None
    closed = look.get("not_opened")
    return Look(
        digest=str(look.get("digest")),
        newest=int(look.get("newest", 0)),
        files=int(look.get("files", 0)),
        not_opened=tuple(str(name) for name in closed) if isinstance(closed, list) else (),
    )


def run_probe(
    environment: Environment,
    environ: Mapping[str, str],
    *,
    probe: str,
    level: str,
    seconds: float,
    variables: Mapping[str, str] | None = None,
    passed: Sequence[str] = (),
    image: str | None = None,
    pass_fds: tuple[int, ...] = (),
    binds: tuple[Bind, ...] = (),
    data: tuple[Bind, ...] = (),
    since: int | None = None,
) -> dict[str, Any]:
    """Run the probe inside an environment.

    Args:
        probe: the text of the probe program (probe_source.py).
        level: `record`, `full` or `deep`.
        since: for a second check, the time of the latest change that the first check saw (`Look.newest`).
        environment, environ, seconds, variables, passed, image, pass_fds, binds, data: as for `run_text`.

    Raises:
        HpcenvError: the probe could not be started, or did not end in time.
        ValueError: the output of the probe is not a record of the probe.
    """
    words = [*_started(environment), *_site(environment), *_since(since)]
    output = run_text(
        environment,
        environ,
        text=probe,
        words=[*words, "--revision", str(environment.revision), "--level", level],
        seconds=seconds,
        variables=variables,
        passed=passed,
        image=image,
        pass_fds=pass_fds,
        binds=binds,
        data=data,
    )
    return parse_probe(output, level=level)


def run_text(
    environment: Environment,
    environ: Mapping[str, str],
    *,
    text: str,
    words: Sequence[str],
    seconds: float,
    variables: Mapping[str, str] | None = None,
    passed: Sequence[str] = (),
    image: str | None = None,
    pass_fds: tuple[int, ...] = (),
    binds: tuple[Bind, ...] = (),
    data: tuple[Bind, ...] = (),
) -> str:
    """Run a Python program inside an environment, started in the same way as the ranks, and return its output.

    Args:
        environment: the environment in which the program runs.
        environ: the environment variables of this process.
        text: the text of the program. The text is sent through stdin, so no file has to be mounted.
        words: the arguments of the program.
        seconds: time limit.
        variables: variables that will be set for the ranks.
        passed: names of variables of the job that the ranks will also see.
        image: path of the SIF; None for the SIF of `environment`. If the path names an open file, `pass_fds` contains
            the descriptor of that file.
        binds: folders that the ranks will see and that may hide parts of the image.
        data: binds of copied data folders, which replace other binds with the same target.

    Raises:
        HpcenvError: the program could not be started, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="hpcenv-probe-", ignore_cleanup_errors=True) as home:
        entry = build_start_command(
            environment,
            [environment.python, *_PROBE_OPTIONS, "-", *words],
            # This folder exists in every image.
            workdir="/",
            variables=variables or {},
            inherited=environ,
            passed=passed,
            image=image,
            home=home,
            binds=binds,
            data=data,
        )
        with opened(entry) as (argv, files):
            try:
                done = process.run(
                    argv, timeout=seconds, env=entry.env, stdin=text, cwd=entry.cwd, pass_fds=(*pass_fds, *files)
                )
            except ToolFailed as error:
                if environment.kind == "host":
                    raise
                raise runtime.why_not_started(error, environment.apptainer, environ) from error
    return done.stdout


def parse_probe(text: str, *, level: str) -> dict[str, Any]:
    """Return the probe's record, which is the last line of its output.

    Raises:
        ValueError: the output has no record, or the record has another schema or level, or lacks a part.
    """
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or (answer.get("schema"), answer.get("level")) != (1, level):
        raise ValueError(f"the probe answered {lines[-1][:200] if lines else ''!r}")
    parts = {"values": dict, "unknown": dict, "packages": list}
    broken = [part for part, kind in parts.items() if not isinstance(answer.get(part), kind)]
    if broken:
        raise ValueError(f"the probe's answer has no usable {', '.join(broken)}")
    return answer


def _as_value(value: object) -> Value:
    if isinstance(value, list):
        return tuple(str(item) for item in value)
    if isinstance(value, (str, int, float, bool)):
        return value
    raise ValueError(f"not a fact: {value!r}")
