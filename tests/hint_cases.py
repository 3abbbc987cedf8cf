"""Errors whose hint a script can follow, and the commands of hints that no script here can follow, with the reason.

A case is provoked as a user would: some shell, then a command line. `places` names the commands of hints in the code
that the case follows (tests/contract/test_hints.py compares them with the code); the hint of a case without places is
text that names an option, a word or a command in backticks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

ONE = ("--nodes", "1", "--gpus", "0", "--nproc", "1")
LOCAL = ("--nproc", "1", "--cluster", "local")
GIT = "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm one"
LOCK = "lockfiles/default.lock.toml"
RUN = "hpcenv submit train.py --nodes 1 --gpus 0 --nproc 1 --name a --wait >/dev/null 2>&1"


@dataclass(frozen=True)
class Case:
    """One error and its hint.

    Attributes:
        argv: after `hpcenv`.
        setup: shell in a locked project with a train.py.
        places: `file: words` in hpcenv/ of the commands that are followed.
        fills: word in capitals that the hint asks the reader to replace -> what the reader writes.
        adds: options that the reader has to know from elsewhere: a reason stands beside them.
        wrong: the word that "perhaps you meant `WORD`" replaces.
        statuses: that a followed command may end with: the status of a run is no error of the command.
        ended: it needs a project with an ended run `a` and an ended sweep `s`, and changes neither.
        tidy: shell afterwards.
        long: why it takes long.
    """

    name: str
    argv: tuple[str, ...]
    setup: str = ""
    places: tuple[str, ...] = ()
    fills: Mapping[str, str] = field(default_factory=dict)
    adds: tuple[str, ...] = ()
    wrong: str = ""
    statuses: tuple[int, ...] = (0,)
    ended: bool = False
    tidy: str = ""
    long: str = ""


FILLED = {"SCRIPT": "train.py", "N": "1", "G": "1"}
# The testbed's torch has no CUDA; only there these words are needed.
FOR_CPU = ("--allow-cpu-torch", "--dry-run")

CASES: tuple[Case, ...] = (
    Case("a run that does not exist", ("status", "nosuch"), ended=True, places=("runs/find.py: hpcenv list *",)),
    Case(
        "after a run that failed",
        ("submit", "train.py", *ONE, "--after", "bad"),
        "echo 'raise SystemExit(3)' > bad.py; "
        "hpcenv submit bad.py --nodes 1 --gpus 0 --nproc 1 --name bad --wait >/dev/null 2>&1 || true",
        ("submission/after.py: hpcenv report *",),
    ),
    Case(
        "no runs at all",
        ("status",),
        "mkdir -p runs",
        ("runs/find.py: hpcenv submit SCRIPT --nodes N --gpus G",),
        FILLED,
        FOR_CPU,
    ),
    Case("a sweep where one run is needed", ("logs", "s"), ended=True, places=("runs/find.py: hpcenv list *",)),
    Case("no hpcenv.toml", ("lock",), "rm hpcenv.toml", ("project/workspace.py: hpcenv init",)),
    Case(
        "no lockfile of that name",
        ("submit", "train.py", *LOCAL, "--lock", "paper"),
        places=("project/workspace.py: hpcenv lock *",),
    ),
    Case(
        "a damaged lockfile under git",
        ("submit", "train.py", *LOCAL),
        f"{GIT} && echo 'kind = 3' > {LOCK}",
        ("project/workspace.py: git checkout -- *", "project/workspace.py: hpcenv lock *"),
    ),
    Case(
        "a damaged lockfile without git",
        ("submit", "train.py", *LOCAL),
        f"echo 'kind = 3' > {LOCK}",
        ("project/workspace.py: hpcenv lock *",),
    ),
    Case(
        "a lockfile edited by hand, seen from a deeper folder",
        ("lock", "--check"),
        f"{GIT} && sed -i 's/^version = .*/version = \"0\"/' {LOCK}; mkdir deeper; cd deeper",
        ("project/workspace.py: git checkout -- *", "project/workspace.py: hpcenv lock *"),
    ),
    Case(
        "a stale lockfile",
        ("submit", "train.py", *LOCAL),
        "printf '[env]\\nX = \"1\"\\n' >> hpcenv.toml",
        ("project/stale.py: hpcenv lock *",),
    ),
    Case("no command", (), places=("cli/_errors.py: hpcenv --help",)),
    Case(
        "an option with a misspelt name",
        ("submit", "train.py", "--nodez", "1", "--gpus", "0", "--nproc", "1"),
        places=("cli/_errors.py: hpcenv *",),
    ),
    Case("an option that no command has", ("status", "--xyzzy"), places=("cli/_errors.py: * *",)),
    Case(
        "an option of the script",
        ("submit", "train.py", "--xyzzy", *ONE),
        fills={"SCRIPT": "train.py", "OPTIONS": "--nproc 1"},
        places=("cli/_errors.py: hpcenv submit SCRIPT OPTIONS -- *",),
    ),
    Case("a misspelt option of another command", ("list", "--jsno"), places=("cli/_errors.py: hpcenv *",)),
    Case(
        "an option of sbatch in its short form",
        ("submit", "train.py", "-N", "1", "--gpus", "0", "--nproc", "1"),
        places=("cli/_foreign_options.py: hpcenv *",),
    ),
    Case(
        "an option of sbatch that is passed on",
        ("submit", "train.py", *ONE, "--mail-type", "END"),
        places=("cli/_foreign_options.py: hpcenv *",),
    ),
    Case(
        "an option of torchrun that hpcenv sets",
        ("submit", "train.py", *ONE, "--rdzv_id", "x"),
        places=("cli/_foreign_options.py: hpcenv submit --help",),
    ),
    Case(
        "an option of sbatch whose number hpcenv counts in another way",
        ("submit", "train.py", "--gpus", "0", "--ntasks-per-node", "1"),
        places=("cli/_foreign_options.py: hpcenv * * *",),
    ),
    Case(
        "a shell script",
        ("submit", "job.sh", "--nproc", "1"),
        "printf '#!/bin/bash\\nsrun torchrun --nproc_per_node 8 train.py --lr 1\\n' > job.sh",
        ("submission/shell_script.py: hpcenv submit * * *",),
        FILLED,
        FOR_CPU,
    ),
    Case(
        "a word that starts scripts",
        ("submit", "torchrun", "train.py", *ONE),
        places=("submission/shell_script.py: *",),
    ),
    Case(
        "the file of a module",
        ("submit", "-m", "package/train.py", *ONE),
        "mkdir package && cp train.py package/",
        ("submission/module_file.py: *",),
    ),
    Case(
        "a run that has ended", ("attach", "a", "--", "true"), ended=True, places=("runs/attach.py: hpcenv status *",)
    ),
    Case(
        "a run that does not end in time",
        ("wait", "a", "--timeout", "1s"),
        "echo 'import time; time.sleep(4)' > train.py; " + RUN.replace("--wait", ""),
        ("runs/wait.py: hpcenv logs -f *",),
    ),
    Case(
        "a damaged record",
        ("status", "a"),
        "mkdir -p runs/a && echo '{' > runs/a/submission.json",
        ("runs/entries.py: hpcenv list",),
    ),
    Case(
        "a folder that was never submitted",
        ("report", "a"),
        f"{RUN}; rm runs/a/submission.json",
        ("runs/entries.py: hpcenv status *",),
    ),
    Case("no run is named", ("cancel",), RUN.replace("--wait", ""), ("cli/cancel.py: hpcenv cancel *",)),
    Case(
        "one run of a sweep",
        ("clean", "s/0000", "--yes"),
        ended=True,
        places=("runs/clean.py: hpcenv clean *",),
        adds=("--dry-run",),
    ),
    Case(
        "a log before the job starts",
        ("logs", "a"),
        RUN.replace("--wait", "--sbatch begin=now+1hour"),
        ("runs/logs.py: hpcenv status *",),
        tidy="hpcenv cancel a",
    ),
    Case("a log that is gone", ("logs", "a"), f"{RUN}; rm runs/a/job.log", ("runs/logs.py: hpcenv logs --err *",)),
    Case(
        "neither a lockfile nor a run",
        ("diff", "nosuch", "a"),
        ended=True,
        places=("locking/diff.py: hpcenv diff lockfiles/default.lock.toml RUN",),
        fills={"RUN": "a"},
    ),
    Case("a field that does not exist", ("explain", "xyzzy"), places=("locking/explain.py: hpcenv explain",)),
    Case(
        "values that are not valid",
        ("submit", "train.py", "--nproc", "1", "--time", "soon"),
        places=("submission/request.py: hpcenv submit --help",),
    ),
    Case(
        "an option that the run did not have",
        ("rerun", "a", "--without", "xyzzy"),
        ended=True,
        places=("submission/rerun.py: hpcenv rerun --help",),
    ),
    Case(
        "inputs that have changed",
        ("rerun", "a"),
        f"{RUN}; echo >> train.py",
        ("submission/rerun.py: hpcenv diff * NEW_RUN",),
        {"NEW_RUN": "a"},
    ),
    Case(
        "an option that srun does not have",
        ("submit", "train.py", *ONE, "--srun", "xyzzy=1"),
        places=("submission/early_checks.py: srun --help",),
    ),
    Case(
        "a script that cannot be read",
        ("submit", "train.py", *ONE),
        "chmod 000 train.py",
        ("submission/early_checks.py: ls -l *",),
    ),
    Case(
        "a lockfile that cannot be read",
        ("submit", "train.py", *ONE),
        f"chmod 000 {LOCK}",
        ("project/workspace.py: ls -ld *",),
    ),
    Case(
        "a site profile that does not exist",
        ("submit", "train.py", *ONE, "--site", "xyzzy"),
        places=("submission/choose_site.py: hpcenv doctor",),
    ),
    Case(
        "a store without images",
        ("image", "inspect", "docker://registry:5000/hpcenv/torch:2.13.0-cpu", "--path", "--store", "my store"),
        places=("locking/image_path.py: hpcenv image pull *",),
        # Whether a registry can be trusted without TLS is the user's own decision.
        adds=("--plain-http", "registry:5000"),
        long="an image is converted",
    ),
    Case(
        "an image and a lockfile",
        ("image", "inspect", "x", "--lock", "default"),
        places=("cli/image/inspect.py: hpcenv image inspect --help",),
    ),
    Case(
        "an image by an unknown digest",
        ("image", "inspect", "sha256:0123456789", "--path"),
        places=("locking/image_path.py: hpcenv image list", "locking/image_path.py: hpcenv image pull REFERENCE"),
        fills={"REFERENCE": "--plain-http registry:5000 docker://registry:5000/hpcenv/torch:2.13.0-cpu"},
        long="an image is converted",
    ),
    Case(
        "a folder of runs that is gone",
        ("rerun", "a"),
        f"mkdir deep && cp train.py deep && cd deep && {RUN}; cd .. && rm -r deep",
        ("submission/rerun.py: *",),
    ),
    Case(
        "a project that asks for something outside of it",
        ("submit", "train.py", *ONE),
        "mkdir new && cp -r hpcenv.toml lockfiles train.py new && cd new",
        ("cli/_accept.py: hpcenv * --accept * *",),
    ),
    Case(
        "a GPU that this CUDA does not compile for",
        ("image", "init", "--torch", "2.13.0", "--cuda", "13.0", "--build", "apex==0.1", "--gpu", "v100"),
        places=("recipes/compiled_packages.py: hpcenv compat --gpu *",),
    ),
    # -- text ---------------------------------------------------------------------------------
    Case("a misspelt script", ("submit", "trian.py", *ONE), wrong="trian.py"),
    Case(
        "a misspelt module",
        ("submit", "-m", "package.trian", *ONE),
        "mkdir package && cp train.py package/",
        wrong="-m package.trian",
    ),
    Case("a module in place of a script", ("submit", "package.train", *ONE), "mkdir package && cp train.py package/"),
    Case("a misspelt partition", ("submit", "train.py", *ONE, "--partition", "debgu")),
    Case("a partition like no other", ("submit", "train.py", *ONE, "--partition", "xyzzy")),
    Case("more nodes than there are", ("submit", "train.py", "--nodes", "99", "--gpus", "0", "--nproc", "1")),
    Case("a node that does not exist", ("submit", "train.py", *ONE, "--nodelist", "n7")),
    Case("how many ranks", ("submit", "train.py"), fills={"N": "1", "G": "1", "R": "1"}, adds=FOR_CPU),
    Case("code that is not committed", ("submit", "train.py", *ONE), f"{GIT}; echo >> train.py"),
    Case("GPUs for a torch that cannot use them", ("submit", "train.py", "--gpus", "1"), fills={"R": "1"}),
    Case("which runs", ("clean",), ended=True, adds=("--dry-run",)),
    Case("an account that does not exist", ("submit", "train.py", *ONE, "--account", "xyzzy")),
    Case("a sweep twice", ("submit", "train.py", *ONE, "--sweep", "a=1", "--sweep", "a=2")),
    Case("a secret that is not set", ("submit", "train.py", *ONE, "--secret", "T=env:XYZZY")),
    Case("a run name that is taken", ("submit", "train.py", *ONE, "--name", "a"), ended=True, fills={"NAME": "b"}),
)

_NETWORK = "it needs a package index"
_FAULT = "it needs a failure of Slurm in the middle of a submission; tests/cluster/test_flaky_slurm.py makes them"
_KEYS = "somebody has to press ^C"
_DISK = "it needs a full disk, so root"
_DAMAGED_IMAGE = "it needs a damaged image; tests/unit/image and tests/cluster/test_layer_cases.py make them"

NOT_FOLLOWED: dict[str, str] = {
    "cli/image/init.py: sh *": "tests/cluster/test_session_services.py types it, with a real image",
    "exports/training.py: hpcenv lock": "it needs the image in a registry first: tests/unit/exports/test_exports.py reads it",
    "exports/training.py: skopeo copy * docker://HOST/NAME:TAG": "words to fill in: tests/unit/exports/test_exports.py reads it",
    "plugins/hydra_plugins/hpcenv_launcher.py: hpcenv report *": "it is raised in a program of the user, not on a command line",
    "runs/run_list.py: python -m pip install pandas": "it needs an index: tests/contract/test_results_page.py has pandas",
    "sessions/tools.py: hpcenv image init --tools *": "tests/cluster/test_session_services.py types it, with a real image",
    "sessions/tools.py: hpcenv lock": "after the packages of the line before it: tests/unit/sessions/test_tools.py reads both",
    "sessions/tools.py: python3 -m pip install *": "it needs an index: tests/unit/sessions/test_tools.py reads it",
    "sessions/tools.py: sh image/add-tools.sh": "tests/cluster/test_session_services.py types it, with a real image",
    "sessions/folders.py: chmod 700 *": "the folder of a session must be open to others: a program of the shell, not of hpcenv",
    "submission/session.py: hpcenv attach *": "it needs a session: tests/cluster/test_sessions.py types it",
    "submission/session.py: hpcenv cancel *": "it needs a session: tests/cluster/test_sessions.py types it",
    "submission/session.py: hpcenv run": "it is the command in place of a session on a machine without Slurm",
    "runs/hangs.py: hpcenv status *": "it needs a run that waits or is being checked: tests/cluster/test_hangs.py has runs",
    "cli/_other_words.py: *": "programs of others, and words to fill in: tests/unit/cli/test_other_words.py asks each command for its help",
    "cli/data/listing.py: hpcenv data fetch": "it is a note, no error; it needs a hub",
    "hub/fetch.py: pip install huggingface_hub>=2,<3": "no test installs from an index; tests/unit/hub/test_fetch.py reads the hint",
    "hub/refusals.py: hpcenv data resolve *": "it needs a hub: tests/unit/hub/test_fetch.py has one",
    "hub/tree.py: hpcenv data fetch": "it needs a hub: tests/unit/submission/test_hub_cache.py types it",
    "cli/image/_conversion.py: *": _DAMAGED_IMAGE,
    "cli/image/_conversion.py: * *": _DAMAGED_IMAGE,
    "image/convert/layer_index.py: hpcenv image build --limit *": _DAMAGED_IMAGE,
    "image/convert/layer_index.py: hpcenv image pull REFERENCE": _DAMAGED_IMAGE,
    "image/convert/squashfs.py: srun -c 8 hpcenv image pull REFERENCE": "the kernel must end mksquashfs; tests/cluster/test_image_faults.py does it",
    "image/content/tar_stream.py: hpcenv image build": _DAMAGED_IMAGE,
    "image/reference.py: hpcenv image build *": "it needs buildah or podman: tests/unit/recipes/test_dockerfile_build.py runs it",
    "recipes/dockerfile_build.py: hpcenv image pull docker://HOST/NAME:TAG": "a pull of an image: followed for image_path.py",
    "recipes/refresh.py: hpcenv image init --torch VERSION": "it asks package indexes: tests/cluster/test_image_init.py types it",
    "cli/image/refresh.py: hpcenv export cyclonedx -o bom.cdx.json": "after a build: tests/unit/locking/test_exporter.py exports it",
    "recipes/dockerfile_build.py: hpcenv image init --torch VERSION": "it asks package indexes: tests/cluster/test_image_init.py types it",
    "image/reference.py: hpcenv image pull *": "it needs a SIF in a registry: tests/unit/image/test_sif_registry.py pulls one",
    "image/registry/manifests.py: hpcenv image pull *": "it needs a SIF in a registry: tests/unit/image/test_sif_registry.py pulls one",
    "image/sif_registry.py: hpcenv image pull *": "a pull of an image: followed for image_path.py",
    "image/registry/manifests.py: hpcenv image pull * --platform *": _DAMAGED_IMAGE,
    "submission/locked_command.py: hpcenv report *": "a node must differ: tests/unit/cli/test_run.py types it",
    "runs/network.py: hpcenv net explain --from *": "the run was decided by an older hpcenv, or was refused",
    "api/job.py: hpcenv report *": "it is raised in a program of the user, not on a command line",
    "cli/_render.py: * * *": "it adds --store to a command of another place",
    "cli/_wait.py: hpcenv cancel *": _KEYS,
    "cli/_wait.py: hpcenv * *": _KEYS,
    "cli/_wait.py: hpcenv report RUN": "a word to fill in, for a run that exists: tests/unit/cli/test_run_pages.py types it",
    "cli/_other_words.py: hpcenv submit *": "the user's own words: tests/unit/cli/test_other_words.py reads it",
    "submission/verify_nodes.py: hpcenv cancel *": _KEYS,
    "reproduction/new_run.py: hpcenv bundle make RUN --with-sif FILE": "the authors of the run type it",
    "reproduction/new_run.py: hpcenv report *": "a reproduction has to fail on its nodes",
    "reproduction/bundle/unpacked.py: hpcenv bundle unpack * FOLDER": "tests/unit/reproduction/test_reproduce.py types it",
    "reproduction/explain_op.py: hpcenv rerun * --trace-steps * --stop-after-steps * --name *": "another machine has to make the trace: tests/unit/reproduction/test_explain_op.py types it where torch is",
    "reproduction/explain_op.py: hpcenv compare --explain-op *": "it needs that trace: tests/unit/reproduction/test_explain_op.py types it",
    "cli/report.py: hpcenv compare * *": "it needs two runs with metrics: tests/unit/reproduction/test_compare.py compares recorded ones",
    "submission/verify_nodes.py: hpcenv logs *": "the check itself must fail on a node",
    "cli/image/listing.py: hpcenv image pull REFERENCE": "it is a note, no error; the pull is followed for locking/image_path.py",
    "filesystem.py: hpcenv image prune": _DISK,
    "image/pull.py: hpcenv image pull *": "the tag must be gone from the registry",
    "image/reference.py: hpcenv image build FILE.def": "a build as a user needs user namespaces for apptainer's root",
    "image/registry/blobs.py: hpcenv image prune": _DISK,
    "image/registry/refusals.py: docker login *": "docker is not on the testbed, and it asks for a password",
    "image/registry/refusals.py: hpcenv image pull --plain-http * *": "a pull over http: followed for image_path.py",
    "image/free_space.py: hpcenv image prune": _DISK,
    "image/store/store.py: hpcenv image prune --all": "two users must change one store at the same time",
    "image/store/store_folder.py: hpcenv image pull REFERENCE": "the same pull is followed for locking/image_path.py",
    "image/sif_proof.py: hpcenv image pull * *": _DAMAGED_IMAGE,
    "image/sif_proof.py: hpcenv image verify * --image *": "the reader names the image of a file from elsewhere",
    "locking/diff.py: git log --oneline -- *": "the project of these cases is not under git",
    "locking/definition_build.py: hpcenv image pull *": "it needs two registries, one with TLS",
    "locking/formats/cyclonedx.py: pip install cyclonedx-python-lib>=11": _NETWORK,
    "locking/formats/pylock.py: hpcenv export requirements": _NETWORK,
    "locking/formats/pylock.py: pip config list": _NETWORK,
    "locking/image_path.py: hpcenv image build --lock *": "it makes a SIF, which takes a minute: tests/unit/locking/test_lock_image.py runs it",
    "locking/image_path.py: hpcenv lock": "a SIF file of the project was replaced; `lock` is followed elsewhere",
    "locking/lock.py: hpcenv lock --from *": "it needs conda; tests/unit/locking/test_conda_packages.py follows it",
    "locking/lock.py: hpcenv lock": "a SIF in the store must be replaced by another one",
    "locking/overlay.py: hpcenv lock": "the lockfile must be one of an older hpcenv",
    "locking/overlay.py: mksquashfs * *": "tests/cluster/test_overlay.py packs a folder",
    "locking/overlay.py: mksquashfs DIR x.sqsh": "the lockfile must be one of an older hpcenv",
    "locking/overlay.py: mksquashfs FOLDER *": "FOLDER is the user's; tests/cluster/test_overlay.py packs one",
    "locking/overlay.py: * python3 -m venv --system-site-packages *": "it makes an environment in FOLDER; "
    "tests/cluster/test_overlay.py makes one so",
    "locking/pins/uv_export.py: * -o pylock.toml": "uv is a program of the user",
    "locking/pins/uv_export.py: uv lock": "it may need an index; tests/unit/locking/pins/test_uv.py has the refusal",
    "locking/pins/uv_export.py: uv sync *": "it may need an index; tests/unit/locking/pins/test_uv.py has the refusal",
    "locking/project_image.py: hpcenv lock --upgrade": "an archive was replaced; tests/unit/locking/test_lock_image.py",
    "container/apptainer.py: hpcenv lock": "the image must be gone from the registry",
    "container/apptainer.py: hpcenv image build --compression gzip": "it needs SingularityCE; docs/reference/runtimes.md",
    "machine/this_node.py: hpcenv submit SCRIPT": "somebody must start a step of a job by hand",
    "project/stale.py: mksquashfs DIR x.sqsh": "the lockfile must be one of an older hpcenv",
    "project/stale.py: hpcenv image build *": "it makes a SIF, which takes a minute: tests/unit/locking/test_lock_image.py runs it",
    "project/toml_files.py: ls -ld *": "it shows the permissions that are missing; followed for project/workspace.py",
    "project/workspace.py: pip install --upgrade hpcenv": _NETWORK,
    "recipes/pinned_packages.py: hpcenv export pylock": _NETWORK,
    "runs/cancel.py: hpcenv status *": "a process must wait for a disk that does not answer",
    "runs/find.py: ls -ld *": "it shows the permissions that are missing; followed for project/workspace.py",
    "submission/early_checks.py: chmod 600 *": "it changes a file of the user",
    "runs/wait.py: hpcenv cancel *": "it needs a job that Slurm does not start: tests/unit/runs/test_wait.py reads it",
    "runs/attach.py: hpcenv attach * -- COMMAND": "it needs a run that trains; tests/cluster/test_follow.py attaches",
    "runs/attach.py: hpcenv logs -f *": "it needs a run that is being checked; `logs -f` is followed for runs/wait.py",
    "runs/lost.py: scontrol show job *": "the run folder of a running job must be gone",
    "runs/lost.py: hpcenv cancel *": "the run folder of a running job must be gone: tests/cluster/test_run_folder.py",
    "runs/lost.py: hpcenv status *": "the run folder of a running job must be gone: tests/cluster/test_run_folder.py",
    "submission/locked_container.py: hpcenv * *": "it makes a SIF, which takes a minute; `hpcenv lock` is followed elsewhere",
    "submission/locked_container.py: hpcenv lock *": "it makes a SIF, which takes a minute; `hpcenv lock` is followed elsewhere",
    "submission/module_file.py: hpcenv submit *": "for a module whose file has no name in Python: train-it.py",
    "submission/module_file.py: hpcenv submit -m *": "for callers in Python, whose command line hpcenv does not know",
    "submission/submit.py: hpcenv status *": _FAULT,
    "submission/submit.py: squeue *": _FAULT,
    "submission/sweep_job.py: hpcenv wait *": "the sweep must outlive `submit --wait --timeout`: tests/unit/submission/test_sweep_job.py",
    "submission/sweep_job.py: squeue *": _FAULT,
}
