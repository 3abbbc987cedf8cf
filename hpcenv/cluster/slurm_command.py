"""Start Slurm's commands in a cleaned environment, and explain slow commands and refusals.

Runs on: LOGIN NODE. The commands about jobs are in the module `slurm`, which a submission does not need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpcenv import process
from hpcenv.cluster import munge
from hpcenv.container.start_command import is_passed
from hpcenv.records.variables import looks_like_credential, without_credential

# Variables that would change what Slurm's commands do or print are removed. SBATCH_* override #SBATCH lines.
# SQUEUE_FORMAT and SACCT_FORMAT change the output. A job that is submitted from inside another job inherits the
# variables of the outer job (inherited SLURM_CPU_BIND pinned eight ranks to four cores, goodfire-ai/spd#955).
_KEPT = re.compile(r"SLURM_(CONF|CONF_SERVER|CLUSTERS|JWT|JWKS|SACK_\w+|DEBUG_FLAGS)\Z")
_SCRUBBED = re.compile(r"(SLURM|SLURMD|SLURMSTEPD|SBATCH|SRUN|SQUEUE|SACCT|SCANCEL|SINFO|SALLOC|PMI|PMIX|OMPI|HPCENV)_")
_LAUNCHER = re.compile(
    r"(RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|NODE_RANK|MASTER_ADDR|MASTER_PORT|"
    r"(GROUP|ROLE)_(RANK|NAME|WORLD_SIZE)|PET_\w+|TORCHELASTIC_\w+|SUBMITIT_\w+|APPTAINER\w*|SINGULARITY\w*)\Z"
)


# In a rank, the start gate and torchrun have chosen these variables. If another job inherited them, they would look
# like the user's choice (seen: `GLOO_SOCKET_IFNAME=lo` of a one-node job).
_OF_A_RANK = re.compile(r"((NCCL|GLOO|TP)_SOCKET_IFNAME|OMP_NUM_THREADS|TORCH_NCCL_ASYNC_ERROR_HANDLING)\Z")

# In a run, for example in a session, these variables describe the node and the job. A different job has different
# values.
_OF_A_RUN = re.compile(r"((CUDA|HIP|NVIDIA|ROCR)_VISIBLE_DEVICES|ZE_AFFINITY_MASK|TMPDIR|(JUPYTER|JPY)_\w+)\Z")


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for Slurm's commands and for the job. Pure.

    `SLURM_CONF` and similar variables stay: they select the cluster.
    """
    in_a_run = "HPCENV_RUN" in environ
    in_a_rank = in_a_run or "TORCHELASTIC_RUN_ID" in environ
    return {
        name: value
        for name, value in environ.items()
        if (_KEPT.match(name) or not _SCRUBBED.match(name))
        and not _LAUNCHER.match(name)
        and not (in_a_rank and _OF_A_RANK.match(name))
        and not (in_a_run and _OF_A_RUN.match(name))
    }


def environment_to_store(environ: Mapping[str, str], passed: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment for sbatch without credentials, because Slurm stores it with the job. Pure.

    `sbatch --export=LIST` is not used, because Slurm then loads the environment of a login (sbatch(1)).

    Args:
        passed: names or patterns (`HF_*`) of variables that the ranks must get from the job.
    """
    return {
        name: value if is_passed(name, passed) else without_credential(value)
        for name, value in clean_environment(environ).items()
        if not looks_like_credential(name) or _KEPT.match(name) or is_passed(name, passed)
    }


def run(argv: Sequence[str], env: Mapping[str, str], *, timeout: float, stdin: str | None = None) -> process.Completed:
    """Run a command of Slurm. If the command is slow and munge does not work on this machine, the error names munge.

    Raises:
        ToolMissing, ToolFailed: as for `process.run`.
    """
    return process.run(
        argv,
        timeout=timeout,
        env=env,
        stdin=stdin,
        slow=munge.SECONDS_UNTIL_ASKED,
        explain=lambda: munge.explain(env),
    )


def rejection(said: str) -> tuple[str, str | None]:
    """Return sbatch's error message in one line, and a hint."""
    lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
    reason = " / ".join(line.split("error:", 1)[-1].strip() for line in lines) or "no message"
    for pattern, hint in _REJECTIONS:
        if re.search(pattern, said, re.IGNORECASE):
            return reason, hint
    return reason, None


_REJECTIONS: Sequence[tuple[str, str]] = (
    (r"munge|authentication", "`munge -n` shows whether munge works on this machine; tell your site's support"),
    (r"invalid partition|partition.*not (available|permit)", "`sinfo --summarize` lists the partitions"),
    (r"invalid account", "`sacctmgr show associations user=$USER` lists your accounts"),
    (r"invalid --mem", "--mem takes a number with K, M, G or T: --mem 64G"),
    (r"reservation", "`scontrol show reservation` lists the reservations"),
    (r"dependency", "--dependency names jobs that Slurm still knows: `squeue --me` lists yours"),
    (r"invalid qos", "`sacctmgr show associations user=$USER format=qos` lists your QOS"),
    (r"time limit is invalid|time limit", "`sinfo --format='%P %l'` shows each partition's limit"),
    (r"gres.*(invalid|unavailable)|invalid generic resource", "`sinfo --format='%P %G'` shows each partition's GPUs"),
    (r"node configuration is not available|more processors", "`sinfo --format='%P %D %c %G'` shows what nodes have"),
    (r"unable to contact slurm controller|connection refused|timed out", "slurmctld does not answer: `scontrol ping`"),
)  # fmt: skip
