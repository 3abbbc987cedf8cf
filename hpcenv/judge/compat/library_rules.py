"""Judge whether cuDNN, NCCL, cuBLAS, torchvision and torchaudio fit the installed torch. Pure.

Runs on: COMPUTE NODE (the batch node). The login node judges a lockfile by the same rules. Standard library only.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from hpcenv.judge.compat import gpu_rules
from hpcenv.judge.compat.libraries import LIBRARIES, Fit, judge_environment, library_of
from hpcenv.judge.compat.versions import numbers
from hpcenv.records.facts import Facts
from hpcenv.records.manifest import Manifest, Severity, Value
from hpcenv.records.severities import STRICTEST_FIRST, Severities
from hpcenv.records.verdict import Finding


def judge(manifest: Manifest, facts: Facts, severities: Severities) -> list[Finding]:
    """Return findings on libraries and packages that do not fit torch; none without GPUs or if torch is a CPU build."""
    needs = manifest.gpu_needs
    torch = facts.values.get("torch.version")
    if needs is None or not needs.cuda or not isinstance(torch, str):
        return []
    packages = [(package.name, package.version) for package in manifest.packages]
    versions = tuple(sorted(versions_of(facts.values, packages).items()))
    return [
        Finding(
            node=facts.node,
            field=one.field,
            locked=one.wanted,
            found=one.found,
            result=one.judgement.result,
            severity=weight(one, severities),
            note=str(one.judgement),
        )
        for one in _fits(needs.table, torch, needs.cuda, versions)
        if one.judgement.result != "match"
    ]


def versions_of(facts: Mapping[str, Value], packages: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return name -> version of the libraries and packages that the table judges.

    If a library itself reports a version, this version is used, not the version of its package. The reason is that the
    loader loads this library.

    Args:
        facts: fields of the environment.
        packages: name and version of every package.
    """
    found = {known: version for name, version in packages if (known := library_of(name))}
    for name in LIBRARIES:
        version = facts.get(f"libs.{name}.version")
        if isinstance(version, str) and numbers(version) is not None:
            found[name] = version
    return found


def weight(fit: Fit, severities: Severities) -> Severity:
    """Return the severity of a finding. Unknown versions never block, and a different patch release only warns."""
    severity = severities.of(fit.field)
    # The field `compat.torch` means that torch is not in the table. [policy] may raise the severity of this field.
    if fit.judgement.result == "unknown" and fit.field != "compat.torch":
        return "info"
    least: Severity = "warn" if fit.patch_only else severity
    return max(severity, least, key=STRICTEST_FIRST.index)


@functools.lru_cache(maxsize=64)
def _fits(text: str, torch: str, cuda: str, versions: tuple[tuple[str, str], ...]) -> tuple[Fit, ...]:
    """Return the judgements. Nodes with the same versions share one judgement."""
    return judge_environment(gpu_rules.table(text), torch=torch, cuda=cuda, versions=dict(versions))
