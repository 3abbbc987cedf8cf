"""Call the functions of all tables of probes.

Runs on: inside the image.
"""

from __future__ import annotations

import time

from hpcenv.incontainer.probe import (
    compiled,
    compilers,
    conda,
    content,
    forward_compat,
    interpreter,
    jax_version,
    libraries,
    network,
    outside_libraries,
    packages,
    programs,
    python,
    startup,
    stdlib,
    system,
    system_packages,
    torch_binary,
    torch_import,
    torch_version,
    unlisted,
    variables,
)
from hpcenv.incontainer.probe.children import end_children
from hpcenv.incontainer.probe.environment import ProbedEnvironment
from hpcenv.incontainer.probe.report import as_json, as_plain_json, report, second_look, write_line
from hpcenv.incontainer.probe.rules import REVISION
from hpcenv.incontainer.probe.table import LEVELS
from hpcenv.incontainer.probe.values import Unknown
from hpcenv.incontainer.probe.text import describe_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hpcenv.incontainer.probe.table import Probe

# The order matters in four places. `python` finds the site directories. `torch_version` finds the CUDA build. The child
# that asks the libraries starts early, and its answers are collected late. The import of torch comes last, because it
# is compared with all values that were read before.
PROBES: tuple[Probe, ...] = (
    *python.PROBES,
    *variables.PROBES,
    *system.PROBES,
    *compilers.PROBES,
    *packages.PROBES,
    *jax_version.PROBES,
    *torch_version.PROBES,
    *libraries.EARLY_PROBES,
    *torch_binary.PROBES,
    *unlisted.PROBES,
    *startup.PROBES,
    *conda.PROBES,
    *system_packages.PROBES,
    *content.PROBES,
    *programs.PROBES,
    *conda.LATE_PROBES,
    *interpreter.PROBES,
    *stdlib.PROBES,
    *compiled.PROBES,
    *libraries.PROBES,
    *network.PROBES,
    *forward_compat.PROBES,
    *outside_libraries.PROBES,
    *torch_import.PROBES,
)


# The probes whose files are checked again when a run ends.
LOOKED_AT_TWICE = frozenset(
    ("path", "packages", "unlisted", "startup", "conda", "content", "conda-content")
    + ("interpreter", "stdlib", "outside-libraries", "preload-file")
)


def main(argv: list[str], training_path: list[str]) -> int:
    """Print one JSON object on one line.

    Args:
        argv: the command line without the program. `--level LEVEL` is the level, record by default. `--python FILE` is
            the program that was started. It may be a script that starts Python. `--since NANOSECONDS` requests a second
            check (report.second_look). `--site FOLDER` is a folder on PYTHONPATH whose packages are read. `--revision
            NUMBER` is the revision of the lockfile (rules.py).
        training_path: sys.path as a training process gets it.

    Returns:
        0, or 2 for wrong arguments.
    """
    options, problem = _parse_arguments(argv)
    level = options["--level"]
    since = int(options["--since"]) if options["--since"] else None
    env = ProbedEnvironment(
        level,
        training_path,
        started=options["--python"],
        since=since,
        site=options["--site"],
        revision=int(options["--revision"]),
    )
    status = 0
    try:
        if problem:
            status = 2
            raise ValueError(problem)
        for probe in PROBES:
            env.recording = level != "record" and probe.name in LOOKED_AT_TWICE
            if level in probe.levels and (since is None or env.recording):
                _run_probe(env, probe)
    except BaseException as error:  # noqa: BLE001 - the reader needs JSON, after an interrupt too
        _fail_the_rest(env, describe_error(error))
    end_children(env)
    try:
        line = as_json(report(env) if since is None else second_look(env))
    except BaseException as error:  # noqa: BLE001
        line = as_plain_json(level, _fields_of(level), describe_error(error))
    write_line(line)
    return status


def _parse_arguments(argv: list[str]) -> tuple[dict[str, str], str]:
    """Return the options, and the error in the arguments ('' without an error)."""
    given = {"--level": "record", "--python": "", "--since": "", "--site": "", "--revision": str(REVISION)}
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    pairs = dict(zip(words[::2], words[1::2]))
    known = pairs.keys() <= given.keys() and pairs.get("--level", "record") in LEVELS
    numbers = (pairs.get("--since", "0"), pairs.get("--revision", "0"))
    if len(words) % 2 == 0 and known and all(number.isdigit() for number in numbers):
        return {**given, **pairs}, ""
    usage = "usage: probe [--level record|full|deep] [--python FILE] [--site FOLDER] [--revision NUMBER], got "
    return given, usage + " ".join(argv)


def _run_probe(env: ProbedEnvironment, probe: Probe) -> None:
    """Run one probe.

    When this function returns, even after a failure, each field is in `env.values` or `env.unknown`.
    """
    start = time.perf_counter()
    try:
        facts = probe.read(env)
    except Exception as error:  # noqa: BLE001
        facts = {field: Unknown(describe_error(error)) for field in probe.fields}
    for field in probe.fields:
        facts.setdefault(field, Unknown("the probe gave no value"))
    for field, value in facts.items():
        if isinstance(value, Unknown):
            env.unknown[field] = value.reason
        else:
            env.values[field] = value
    env.seconds[probe.name] = round(time.perf_counter() - start, 6)


def _fail_the_rest(env: ProbedEnvironment, reason: str) -> None:
    """For each field of the level that has no value yet, record that it is unknown, with the reason."""
    for field in _fields_of(env.level):
        if field not in env.values:
            env.unknown.setdefault(field, reason)


def _fields_of(level: str) -> list[str]:
    return [field for probe in PROBES if level in probe.levels for field in probe.fields]
