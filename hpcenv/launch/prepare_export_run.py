"""Make a run folder for one job of an exported folder: `python3 -I prepare_export_run.py FOLDER`.

Runs on: COMPUTE NODE, started by the job.sbatch of an exported folder with any Python >= 3.8.
Standard library only; it does not import hpcenv.

An exported folder may be copied to any place and submitted several times. Each job gets its own
run folder, FOLDER/runs/JOBID. The manifest of this run contains the paths of the place where FOLDER is now. A requeued
job finds its run folder again. The script prints the path of the run folder.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from typing import Any, Mapping  # noqa: UP035  (Python 3.8)

# In each run folder, these names are links into the exported folder.
_SHARED = ("code", "inside", "start-hook", "lock.toml")


def main(arguments: list[str], environ: Mapping[str, str]) -> int:
    """Make and print the run folder of this job. If it cannot be made, print the reason and return 91."""
    folder = os.path.abspath(arguments[0])
    job = environ.get("SLURM_JOB_ID", "")
    run = os.path.join(folder, "runs", job)
    try:
        if not job.isdigit():
            raise OSError("SLURM_JOB_ID is not set: submit job.sbatch with sbatch")
        if not os.path.exists(os.path.join(run, "manifest.json")):
            prepare(folder, run, job, environ)
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(
            f"error[file-unusable]: no run folder for this job in {folder}\nwhy: {error}\n"
            "hint: copy the whole folder to a place where you can write and that all nodes can see\n"
        )
        return 91
    sys.stdout.write(run + "\n")
    return 0


def prepare(folder: str, run: str, job: str, environ: Mapping[str, str]) -> None:
    """Write the run folder `run`. The manifest is written last."""
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
    """Return the manifest with the paths of the exported folder replaced by paths in `folder`."""
    before = manifest["run_folder"]

    def here(path: str, place: str = folder) -> str:
        return os.path.join(place, os.path.relpath(path, before)) if path.startswith(before + os.sep) else path

    environment = manifest["environment"]
    if environment["kind"] == "sif":
        sif = environ.get("HPCENV_SIF") or here(environment["sif"])
        if sif != environment["sif"]:
            # The SIF is now another file, so the nodes hash all of it. It must still have the locked hash.
            environment["sif"], manifest["sif"] = os.path.abspath(sif), None
        if not os.path.exists(environment["apptainer"]):
            found = shutil.which("apptainer") or shutil.which("singularity")
            environment["apptainer"] = found or environment["apptainer"]
        own = {"source": folder, "target": folder, "read_only": False}
        environment["binds"] = [*environment["binds"], own]
    if manifest.get("source"):
        # Each job copies the exported code when it begins, and works in its own copy.
        manifest["source"]["folder"] = here(manifest["source"]["folder"], run)
        manifest["source"].update(shared=folder, roots=[])
    for setting in manifest.get("settings", []):
        setting["value"] = here(setting["value"])
    for name in ("script", "workdir"):
        manifest[name] = here(manifest[name], run if manifest.get("source") else folder)
    manifest["run"], manifest["run_folder"] = f"{manifest['run']}-{job}", run
    return manifest


def link(target: str, path: str) -> None:
    """Make a symbolic link. If an interrupted start has already made this link, do nothing."""
    if not os.path.lexists(path):
        os.symlink(target, path)


def write(data: Mapping[str, Any], path: str) -> None:
    """Write a JSON file. A rename makes the file visible, so no reader sees an incomplete file."""
    aside = f"{path}.{os.getpid()}.tmp"
    with open(aside, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, sort_keys=True)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
