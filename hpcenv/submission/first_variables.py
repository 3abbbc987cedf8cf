"""Select the variables of the first run's ranks that must be equal when the run is repeated.

Runs on: LOGIN NODE. Pure. The nodes compare the variables, because only the nodes know which variables the job has. So
each variable of the first run is added to the manifest of the new run as an expectation. Before the new run is queued,
a note names the variables that differ in this shell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hpcenv.container.start_command import let_through
from hpcenv.judge.job_variables import is_compared_as_variable
from hpcenv.records.manifest import Expectation, Manifest
from hpcenv.records.severities import Severities
from hpcenv.records.variables import is_tuning, recorded_value
from hpcenv.records.verdict import Verdict
from hpcenv.submission.plan import Plan
from hpcenv.text import listed

_OF_JOB = "environment of the job"  # the origin of an NCCL variable that hpcenv did not set (machine/network/reach.py)
_ABSENT = "absent"
_SHOWN = 5


def with_first_variables(plan: Plan, before: Manifest, verdict: Verdict | None, environ: Mapping[str, str]) -> Plan:
    """Return the plan with the variables that must be as in the first run, and a note about differences in this shell.

    A variable that an option sets is not included, because `hpcenv rerun` reports differences of options.

    Args:
        before: the manifest of the first run.
        verdict: the verdict of the last attempt of the first run; None if there is no verdict.
    """
    manifest = plan.manifest
    if manifest.environment.kind != before.environment.kind:
        return plan
    if verdict is None or not verdict.inherited:
        note = f"not compared: the variables of the ranks of {before.run}, because that run started no ranks"
        return replace(plan, notes=(*plan.notes, note))
    first, others = _of_first(before, verdict)
    others |= {setting.name for setting in manifest.settings}
    on_host = manifest.environment.kind == "host"
    kept = {name: value for name, value in environ.items() if is_tuning(name)}
    kept |= let_through(environ, manifest.pass_env, on_host=on_host)
    now = {name: recorded_value(name, value) for name, value in kept.items() if is_compared_as_variable(name)}
    known = {expected.field for expected in manifest.expectations}
    wanted = {name: first.get(name, _ABSENT) for name in sorted({*first, *now} - others) if f"env.{name}" not in known}
    severities, note = Severities(manifest.severities), f"compared with the ranks of {before.run}"
    expected = tuple(
        Expectation(field=f"env.{name}", value=value, severity=severities.of(f"env.{name}"), origin=note, note=note)
        for name, value in wanted.items()
    )
    plan = replace(plan, manifest=replace(manifest, expectations=(*manifest.expectations, *expected)))
    # In the job, modules and lines of `setup` may still set the values of the first run.
    changed = (
        []
        if manifest.modules or manifest.setup
        else [name for name in wanted if now.get(name, wanted[name]) != wanted[name]]
    )
    if not changed:
        return plan
    shown = listed([f"{name}={now[name]} ({wanted[name]} before)" for name in changed], _SHOWN)
    note = f"this shell has other variables than the ranks of {before.run} had: {shown}"
    return replace(plan, notes=(*plan.notes, note))


def _of_first(before: Manifest, verdict: Verdict) -> tuple[dict[str, str], set[str]]:
    """Return the variables of the ranks of the first run, and the names of variables that are not compared.

    Variables that an option has set, and variables that belong to one node, job or run, are not compared.
    """
    job = verdict.rendezvous.id.rpartition(".")[0] if verdict.rendezvous is not None else ""
    found: dict[str, set[str]] = {}
    others = {setting.name for setting in before.settings}
    for node, inherited in verdict.inherited.items():
        of_job = (setting for setting in verdict.settings.get(node, ()) if setting.origin == _OF_JOB)
        for setting in (*inherited, *of_job):
            found.setdefault(setting.name, set()).add(setting.value)
            if any(word and word in setting.value for word in (job, before.run_folder)):
                others.add(setting.name)
    others |= {name for name, values in found.items() if len(values) > 1}
    first = {name: values.pop() for name, values in found.items() if is_compared_as_variable(name)}
    return first, others
