"""What NVIDIA's DCGM says of the GPUs of this node, where the site runs it.

Runs on: COMPUTE NODE. Standard library only. Only what DCGM has found in the background is asked (`dcgmi health -c`,
less than a second); no diagnosis of it is started. Source: NVIDIA/DCGM 0fb6699, dcgmi/Health.cpp and DcgmiOutput.cpp.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from hpcenv import process
from hpcenv.errors import HpcenvError
from hpcenv.records.checks import CheckOutcome

# Group 0 has all GPUs.
_ASK = ("health", "-g", "0", "-c", "-j")
_SECONDS = 8.0
# The site has not set it up, or does not let users ask.
_NO_ANSWER = {
    "Health watches not enabled": "no watches are set",
    "unable to establish a connection": "its service does not run, or does not answer to users",
}
_MOST_TEXT = 300


def check_dcgm(environ: Mapping[str, str], *, alone: bool) -> Iterator[CheckOutcome]:
    """Yield the outcomes of both checks of DCGM.

    Args:
        environ: environment of the step.
        alone: all GPUs of the node are this job's. Otherwise a failure is a warning: it may be of another job's GPU.
    """
    program = shutil.which("dcgmi", path=environ.get("PATH"))
    if program is None:
        yield from _not_run("dcgmi is not installed")
        return
    try:
        done = process.run([program, *_ASK], timeout=_SECONDS, env=environ, accept=tuple(range(256)))
    except (HpcenvError, OSError) as error:
        yield from _unknown(error.what if isinstance(error, HpcenvError) else str(error))
        return
    text = f"{done.stdout}\n{done.stderr}".strip()
    for words, why in _NO_ANSWER.items():
        if words in text:
            yield from _not_run(f"dcgmi: {why}")
            return
    yield from _judged(text, alone=alone)


def _not_run(why: str) -> Iterator[CheckOutcome]:
    for name in ("dcgm.health", "dcgm.warning"):
        yield CheckOutcome(id=name, state="not-run", found=why)


def _unknown(why: str) -> Iterator[CheckOutcome]:
    """Yield that DCGM did not answer as it should: no reason to stop a job, so that only the warning is unknown."""
    yield CheckOutcome(id="dcgm.health", state="not-run", found="dcgmi gave no answer: see dcgm.warning")
    yield CheckOutcome(id="dcgm.warning", state="unknown", found=why[:_MOST_TEXT])


def _judged(text: str, *, alone: bool) -> Iterator[CheckOutcome]:
    try:
        body = json.JSONDecoder().raw_decode(text[text.index("{") :])[0]["body"]
        overall = str(body["Overall Health"]["value"])
    except (ValueError, KeyError, TypeError):
        yield from _unknown(f"dcgmi: {(text or 'no answer').splitlines()[0]}")
        return
    if overall not in ("Healthy", "Warning", "Failure"):
        yield from _unknown(f"dcgmi: overall health is {overall!r}")
        return
    details = "; ".join(_entities(body))[:_MOST_TEXT]
    must, warns = (("Failure",), ("Warning",)) if alone else ((), ("Failure", "Warning"))
    for name, wrong in (("dcgm.health", must), ("dcgm.warning", warns)):
        bad = overall in wrong
        yield CheckOutcome(id=name, state="failed" if bad else "fine", found=overall, note=details if bad else "")


def _entities(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield `GPU 3: Memory system: TEXT` for each part that is not healthy."""
    for group, of_group in body.items():
        entities = of_group.get("children") if isinstance(of_group, dict) else None
        for number, entity in (entities or {}).items():
            errors = entity.get("children", {}).get("Errors", {}).get("children", {})
            for system, found in errors.items():
                words = " ".join(map(str, found.get("overflow", ())))
                yield f"{group} {number}: {system}: {words or found.get('value', '')}"
