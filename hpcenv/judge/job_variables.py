"""Decide which variables of a job the ranks get, and which of these variables can change results.

Runs on: COMPUTE NODE, and LOGIN NODE while locking. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Variables of the job that hpcenv passes on to the ranks.
FROM_THE_JOB = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ZE_AFFINITY_MASK",
    "SLURMD_NODENAME",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_CLUSTER_NAME",
    "SLURM_GPUS_ON_NODE",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_END_TIME",
    "SLURM_JOB_ID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES",
    "SLURM_JOB_PARTITION",
    "SLURM_JOB_START_TIME",
    "SLURM_NODEID",
    "SLURM_RESTART_COUNT",
)

# If the environment is the host, programs are found with variables. So the ranks also get the variables of the login,
# of environment modules, certificates, Kerberos tickets and proxies. SLURM_NTASKS and similar variables are left out.
# With these variables, Lightning and accelerate would assume that each process is a task of srun, and would take the
# rank from srun (Lightning 2.6 SLURMEnvironment.detect, accelerate 1.12 utils/environment.py).
OF_LOGIN = re.compile(
    r"(PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TERM|HOSTNAME|SLURM_CONF|"
    r"MODULEPATH|MODULESHOME|LOADEDMODULES|_LMFILES_|(LMOD|XDG)_\w+|"
    r"KRB5CCNAME|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE|"
    r"(https?|ftp|all|no)_proxy|(HTTPS?|FTP|ALL|NO)_PROXY)\Z"
)

# The lockfile already has a field for the value of each of these variables. The probe reads this value inside the
# environment.
_HAS_FIELD = re.compile(
    r"(LD_LIBRARY_PATH|LD_PRELOAD|LD_AUDIT|GLIBC_TUNABLES|PYTHON(PATH|NOUSERSITE|USERBASE|HOME|PLATLIBDIR|"
    r"PYCACHEPREFIX|SAFEPATH|OPTIMIZE|WARNINGS|_FROZEN_MODULES|_PRESITE))\Z"
)


# Variables that the container runtime, a shell in a wrapper around it, or an overlay sets for itself.
_OF_RUNTIME = re.compile(
    r"((APPTAINER|SINGULARITY)\w*|(PREPEND|APPEND|USER)_PATH|VIRTUAL_ENV|PWD|OLDPWD|SHLVL|_|PS1|PROMPT_COMMAND)\Z"
)


def set_by_others(inside: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that have a different value in a started environment than the value from hpcenv. Pure.

    Args:
        inside: all variables that a program in the environment sees.
        given: the variables that hpcenv set or passed on. A value with `$` is expanded later, so it is not compared.
    """
    return {
        name: value
        for name, value in inside.items()
        if is_compared_as_variable(name) and not _OF_RUNTIME.match(name)
        if name not in given or (value != given[name] and "$" not in given[name])
    }


def changes_results(name: str) -> bool:
    """Return whether a variable of the job can change numbers or code. Variables of the login and of Slurm cannot."""
    return not (name in FROM_THE_JOB or name.startswith("SLURM_") or OF_LOGIN.match(name))


def is_compared_as_variable(name: str) -> bool:
    """Return whether nodes must agree on a variable, because it can change results and no field contains it."""
    return changes_results(name) and not _HAS_FIELD.match(name)
