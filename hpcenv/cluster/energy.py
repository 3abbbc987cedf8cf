"""The energy that jobs used, if Slurm's accounting records energy. Runs on: LOGIN NODE.

`ConsumedEnergyRaw` of sacct(1) (Slurm 22.05 to 26.05) is in joules and covers whole nodes. If the site has no plug-in
for energy (AcctGatherEnergyType in slurm.conf), the value is 0 or empty. With such a value, the energy is unknown, not
zero.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcenv import process
from hpcenv.cluster.slurm_command import clean_environment
from hpcenv.errors import HpcenvError

_SECONDS = 20.0
_JOB_ID = re.compile(r"[0-9]{1,18}(_[0-9]{1,18})?")


def consumed(job_ids: Sequence[str], environ: Mapping[str, str]) -> tuple[float | None, str]:
    """Return the joules that jobs used in all their starts, and the source; if unknown, None and the reason."""
    valid = [job_id for job_id in job_ids if _JOB_ID.fullmatch(job_id)]
    if not valid:
        return None, "the run has no job of Slurm"
    env = clean_environment(environ)
    try:
        sacct = process.find_tool("sacct", needed_for="read the energy of a job", path=environ.get("PATH"))
        argv = [sacct, "--noheader", "--parsable2", "--allocations", "--duplicates", f"--jobs={','.join(valid)}"]
        text = process.run([*argv, "--format=JobID,ConsumedEnergyRaw"], timeout=_SECONDS, env=env).stdout
    except HpcenvError as error:
        return None, error.what
    return parse(text)


def parse(text: str) -> tuple[float | None, str]:
    """Return the sum of the values that sacct printed, and the source, in the same form as `consumed`. Pure."""
    values = [line.partition("|")[2].strip() for line in text.splitlines() if "|" in line]
    numbers = [float(value) for value in values if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,6})?", value)]
    if not numbers or len(numbers) < len(values) or not all(numbers):
        return None, "Slurm's accounting lacks the energy of at least one part of the run (AcctGatherEnergyType)"
    return sum(numbers), "sacct, ConsumedEnergyRaw, of whole nodes"
