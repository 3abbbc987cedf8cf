"""Make a run folder for one job out of an exported folder: `python3 -I settle.py FOLDER`.

Runs on: COMPUTE NODE, started by the job.sbatch of `hpcenv export sbatch`, by any Python from
3.8 on. Standard library only, and nothing of hpcenv: it runs alone.

An exported folder may be copied anywhere and submitted again and again: every job gets a run
folder of its own, FOLDER/runs/JOBID, whose manifest has the paths of the place where FOLDER
lies now. A job that starts again finds its own. Prints the run folder's path.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any, Mapping  # noqa: UP035  (Python 3.8)

# What every run folder refers to instead of holding it.
_SHARED = ("code", "inside", "lock.toml")


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Print the run folder of this job; 91 with a reason when there can be none."""
    folder = os.path.abspath(arguments[0])
    job = environ.get("SLURM_JOB_ID", "")
    run = os.path.join(folder, "runs", job)
    try:
        if not job.isdigit():
            raise OSError("SLURM_JOB_ID is not set: submit job.sbatch with sbatch")
        if not os.path.exists(os.path.join(run, "manifest.json")):
            settle(folder, run, job, environ)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(
            f"error[file-unusable]: no run folder for this job in {folder}\nwhy: {error}\n"
            "hint: copy the whole folder to a place that you can write to and that all nodes see\n"
        )
        return 91
    sys.stdout.write(run + "\n")
    return 0


def settle(folder: str, run: str, job: str, environ: Mapping[str, str]) -> None:
    """Write the run folder `run`; the manifest last."""
    with open(os.path.join(folder, "manifest.json"), encoding="utf-8") as file:
        manifest = moved(json.load(file), folder, run, job, environ)
    os.makedirs(run, exist_ok=True)
    for name in _SHARED:
        link(os.path.join("..", "..", name), os.path.join(run, name))
    link(os.path.join("..", "..", f"hpcenv-{job}.log"), os.path.join(run, "job.log"))
    submission = {"schema": manifest["schema"], "run": manifest["run"], "cluster": "slurm", "job_id": job}
    submission.update(submitted=time.time(), command=["sbatch", "job.sbatch"], nodes=manifest["nodes"])
    write(submission, os.path.join(run, "submission.json"))
    write(manifest, os.path.join(run, "manifest.json"))


def moved(manifest: dict[str, Any], folder: str, run: str, job: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the manifest for this place: what lay in the exported folder lies in `folder` now."""
    before = manifest["run_folder"]

    def here(path: str) -> str:
        return os.path.join(folder, os.path.relpath(path, before)) if path.startswith(before + os.sep) else path

    environment = manifest["environment"]
    if environment["kind"] == "sif":
        sif = environ.get("HPCENV_SIF") or here(environment["sif"])
        if sif != environment["sif"]:
            # Another file, which the nodes read as a whole: it must have the locked hash all the same.
            environment["sif"], manifest["sif"] = os.path.abspath(sif), None
        if not os.path.exists(environment["apptainer"]):
            environment["apptainer"] = shutil.which("apptainer") or environment["apptainer"]
        own = {"source": folder, "target": folder, "read_only": False}
        environment["binds"] = [*environment["binds"], own]
    if manifest.get("source"):
        manifest["source"]["folder"] = here(manifest["source"]["folder"])
    manifest["script"] = here(manifest["script"])
    manifest["run"], manifest["run_folder"], manifest["workdir"] = f"{manifest['run']}-{job}", run, folder
    return manifest


def link(aim: str, place: str) -> None:
    """Make a link that may be there from a start that was cut short."""
    if not os.path.lexists(place):
        os.symlink(aim, place)


def write(data: Mapping[str, Any], path: str) -> None:
    """Write JSON: aside, then renamed, so that nobody sees half of it."""
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
