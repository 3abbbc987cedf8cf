"""Which processes each command starts in a project that is not accepted: none that the project can name.

An audit hook in every Python process of a command writes down each program that it starts. The projects name programs
wherever a project can; each of these also leaves a mark, should anything start it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import hpcenv as api
from hpcenv.cli._command_line import cli
from hpcenv.errors import NotAccepted
from hpcenv.project.workspace import read_lockfile
from tests.conftest import ROOT, FakeSlurm
from tests.unit.identity.test_sif import write_sif

SEED = ROOT / "tests" / "fuzz" / "seeds" / "lockfile" / "sif.lock.toml"
RECORDED = ROOT / "tests" / "recorded_runs" / "table-1"

# Programs of the machine that commands start by themselves, wherever they are.
OF_THE_MACHINE = {
    *("git", "ip", "ssh-keygen", "unshare"),
    *("sbatch", "scontrol", "sinfo", "squeue", "sacct", "sacctmgr", "scancel", "srun"),
}

# Written before `hpcenv` is imported: `site` imports a module of this name first.
HOOK = """
import json, os, sys
STARTS = {"subprocess.Popen", "os.posix_spawn", "os.exec", "os.system", "os.spawn", "pty.spawn"}
def note(event, args):
    if event in STARTS:
        words = [args[0] or args[1][0], *args[1][1:]] if event != "os.system" else args
        descriptor = os.open(os.environ["STARTED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(descriptor, json.dumps([os.fsdecode(word) for word in words]).encode() + b"\\n")
        os.close(descriptor)
sys.addaudithook(note)
"""


class Stranger:
    """A repository of somebody else, and a user who has accepted nothing of it."""

    def __init__(self, folder: Path, slurm: FakeSlurm) -> None:
        self.folder, self.mark, self.log = folder / "clone", folder / "it-ran", folder / "started"
        self.folder.mkdir()
        for name in ("evil", "apptainer-of-ours", "singularity"):
            self.program(name)
        hook = folder / "hook"
        hook.mkdir()
        (hook / "sitecustomize.py").write_text(HOOK)
        self.environ = {**slurm.environ, "PYTHONPATH": str(hook), "STARTED": str(self.log), "LANG": "C.UTF-8"}
        self.environ["HOME"] = str(folder)

    def program(self, name: str) -> Path:
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ntouch {self.mark}\necho 'singularity-ce version 4.1.0'\n")
        path.chmod(0o755)
        return path

    def write(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)

    def add_runs(self) -> None:
        """Put two run folders into it, whose records say that they ran in this project."""
        for name in ("table-1", "other"):
            run = self.folder / "runs" / name
            shutil.copytree(RECORDED, run, symlinks=True)
            manifest = json.loads((run / "manifest.json").read_text())
            manifest["submitted_in"] = str(self.folder)
            (run / "manifest.json").write_text(json.dumps(manifest))
            request = json.loads((run / "request.json").read_text())
            request["options"] |= {"locked": True, "runtime": str(self.folder / "evil")}
            (run / "request.json").write_text(json.dumps(request))
        shutil.copy(self.folder / "lockfiles/default.lock.toml", self.folder / "lockfiles/other.lock.toml")

    def types(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Type a command of hpcenv; nothing is accepted."""
        return subprocess.run(
            [sys.executable, "-m", "hpcenv", *words],
            cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=120,
        )  # fmt: skip

    def started(self) -> list[list[str]]:
        """Return each process that was started, with its arguments."""
        return [json.loads(line) for line in self.log.read_text().splitlines()] if self.log.exists() else []

    def require_untouched(self) -> None:
        """Fail if anything was started that is not one of the machine's programs, or hpcenv's own code."""
        assert [words for words in self.started() if not self.is_allowed(words)] == []
        assert not self.mark.exists()

    def is_allowed(self, words: list[str]) -> bool:
        if words[0] == sys.executable:
            return not any(word.startswith(str(self.folder)) for word in words[:3])
        program = os.path.join(self.folder, words[0]) if "/" in words[0] else words[0]
        return Path(program).name in OF_THE_MACHINE and not program.startswith(str(self.folder))


@pytest.fixture
def host(tmp_path: Path, fake_slurm: FakeSlurm) -> Stranger:
    """Its environment is a program of the repository."""
    stranger = Stranger(tmp_path, fake_slurm)
    stranger.write("train.py", "print(1)\n")
    stranger.write("hpcenv.toml", 'image = "host"\npython = "./evil"\n')
    locked = read_lockfile(SEED)
    text = re.sub(r"(?ms)^\[container\].*?(?=^\[python\])", "", SEED.read_text())
    text = text.replace('kind = "sif"', 'kind = "host"').replace(locked.asked.image, "host")
    stranger.write("lockfiles/default.lock.toml", text)
    return stranger


@pytest.fixture
def container(tmp_path: Path, fake_slurm: FakeSlurm) -> Stranger:
    """Its image is a SIF; hpcenv.toml and a site profile that fits the cluster name what starts containers."""
    stranger = Stranger(tmp_path, fake_slurm)
    fake_slurm.replays("scontrol", "scontrol-config")
    stranger.write("train.py", "print(1)\n")
    stranger.write(
        "hpcenv.toml",
        f'image = "a.sif"\n[submit]\nassume-shared = true\nruntime = "{stranger.folder}/apptainer-of-ours"\n',
    )
    lock_sif(stranger)
    stranger.write("sites/here.toml", site(stranger))
    commit_with_traps(stranger)
    return stranger


def site(stranger: Stranger) -> str:
    evil = stranger.folder / "evil"
    return (
        'name = "here"\n[match]\ncluster = "testbed"\n'
        f'[runtime]\nkind = "singularity"\nprogram = "{stranger.folder}/singularity"\nreason = "x"\n'
        f'[entry-wrapper]\ncommand = ["{evil}"]\nreason = "x"\nsource = "x"\n'
    )


def commit_with_traps(stranger: Stranger) -> None:
    """Commit all, and let git's own configuration name the program, too."""
    evil = str(stranger.folder / "evil")
    stranger.write(".gitattributes", "*.py filter=trap\n")
    traps = {"core.fsmonitor": evil, "filter.trap.clean": evil, "filter.trap.process": evil, "core.sshCommand": evil}
    me = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "-A"), (*me, "commit", "-qm", "x")):
        subprocess.run(["git", *words], cwd=stranger.folder, env=stranger.environ, check=True)
    for name, value in traps.items():
        subprocess.run(["git", "config", name, value], cwd=stranger.folder, env=stranger.environ, check=True)
    stranger.write("train.py", "print(2)\n")


def lock_sif(stranger: Stranger) -> None:
    """Lock a SIF that is compressed with zstd, which not every program reads."""
    image = write_sif(stranger.folder / "a.sif")
    digest = hashlib.sha256(image.read_bytes()).hexdigest()
    text = SEED.read_text().replace("3" * 64, digest).replace("docker://registry.example/team/torch:2.13.0", "a.sif")
    stranger.write("lockfiles/default.lock.toml", text)


SUBMIT = ("submit", "train.py", "--nproc", "1", "--gpus", "0", "--allow-dirty", "--frozen")
DRY = (*SUBMIT, "--dry-run")
RUN = "runs/table-1"

# Name of a command -> what a user may type; {run} and {other} are run folders. A command may stop, with any status.
WORDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "attach": (("attach", "{run}"),),
    "bundle make": (("bundle", "make", "{run}", "-o", "b.zip"),),
    "bundle unpack": (("bundle", "unpack", "b.zip", "unpacked"),),
    "bundle verify": (("bundle", "verify", "b.zip"),),
    "cancel": (("cancel", "{run}"),),
    "clean": (("clean", "--dry-run"), ("clean", "--yes")),
    "compare": (("compare", "{run}", "{other}"), ("compare", "{run}", "{other}", "--explain-op")),
    "compat": (("compat", "--gpu", "h100"), ("compat",)),
    "completion": (("completion", "bash"),),
    "data fetch": (("data", "fetch"), ("data", "fetch", "--check")),
    "data list": (("data", "list"),),
    "data resolve": (("data", "resolve", "hf://a/b"),),
    "diagnose": (("diagnose", "{run}"),),
    "diff": (("diff", "{run}", "{other}"),),
    "doctor": (("doctor",), ("doctor", "--json"), ("doctor", "--record", "m.json")),
    "explain": (("explain", "torch.version"),),
    "export": (("export", "requirements"), ("export", "cyclonedx")),
    "image build": (("image", "build"),),
    "image init": (("image", "init", "--base", "localhost:1/a:1"),),
    "image inspect": (("image", "inspect"), ("image", "inspect", "a.sif")),
    "image lint": (("image", "lint", "."), ("image", "lint", "a.sif")),
    "kernel install": (("kernel", "install"),),
    "image list": (("image", "list"),),
    "image prune": (("image", "prune"), ("image", "prune", "--yes")),
    "image pull": (("image", "pull", "docker://localhost:1/a:1"),),
    "image refresh": (("image", "refresh"),),
    "image verify": (("image", "verify", "a.sif"),),
    "init": (("init",),),
    "list": (("list",), ("list", "--all")),
    "lock": (("lock",), ("lock", "--check"), ("lock", "--deep")),
    "logs": (("logs", "{run}"),),
    "net diff": (("net", "diff", "{run}", "{other}"),),
    "net explain": (("net", "explain"), ("net", "explain", "--here"), ("net", "explain", "{run}")),
    "report": (("report", "{run}"),),
    "reproduce": (
        *(("reproduce", "{run}", "--rung", rung, *more) for rung in "03" for more in ((), ("--dry-run",))),
        ("reproduce", "{run}", "--rung", "3", "--copy", "copy", "--dry-run"),
        ("reproduce", "{run}", "--rung", "3", "--lock", "default", "--allow-changed", "--dry-run"),
    ),
    "rerun": (
        *(("rerun", "{run}", "--allow-changed", *more) for more in ((), ("--dry-run",))),
        ("rerun", "{run}", "--allow-changed", "--lock", "other", "--dry-run"),
        ("rerun", "{run}", "--failed", "--dry-run"),
    ),
    "run": (("run", "--", "true"), ("run",)),
    "session connect": (("session", "connect", "{run}"),),
    "session open": (("session", "open", "{run}"),),
    "session ssh-config": (("session", "ssh-config", "{run}", "--login", "localhost"),),
    "session start": (("session", "start", "lab", "--no-wait", "--gpus", "0", "--frozen"),),
    "shell": (("shell", "--gpus", "0", "--frozen"),),
    "site": (("site",), ("site", "here"), ("site", "sites/here.toml")),
    "stacks": (("stacks", "{run}"),),
    "status": (("status",), ("status", "{run}")),
    "top": (("top",), ("top", "{run}")),
    "submit": (
        SUBMIT,
        DRY,
        (*SUBMIT, "--test-only"),
        (*DRY, "--json"),
        (*DRY, "--array", "0-3"),
        (*DRY, "--sweep", "lr=1,2"),
        (*DRY, "--cluster", "local"),
        (*DRY, "--site", "none"),
        (*DRY, "--preflight", "full"),
        (*SUBMIT[:-1], "--dry-run"),
        (*SUBMIT[:-1], "--test-only"),
        ("submit", "-m", "train", *SUBMIT[2:], "--dry-run"),
        ("submit", "--entry", "axolotl", *SUBMIT[2:], "--dry-run"),
        (*SUBMIT, "--export", "out"),
        (*SUBMIT, "--export", "out-compose", "--format", "compose"),
    ),
    "usage": (("usage",),),
    "verify": (("verify",), ("verify", "--nodes", "2"), ("verify", "--deep"), ("verify", "--sif", "a.sif")),
    "wait": (("wait", "{run}", "--timeout", "1s"),),
}


def commands(command: click.Command, before: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Yield each command that does something, with its words."""
    context = click.Context(command)
    if not isinstance(command, click.Group):
        yield " ".join(before), command
        return
    for name in command.list_commands(context):
        inner = command.get_command(context, name)
        assert inner is not None
        yield from commands(inner, (*before, name))


COMMANDS = dict(commands(cli))
# Those that can ask; a project of this kind names a program in one place only.
ASKING = [name for name, one in COMMANDS.items() if any("--accept" in option.opts for option in one.params)]


def test_each_command_has_a_case() -> None:
    assert set(COMMANDS) == set(WORDS)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("container", name) for name in COMMANDS), *(("host", name) for name in ASKING)]
)
def test_no_command_starts_a_program_that_the_project_names(
    request: pytest.FixtureRequest, kind: str, name: str
) -> None:
    stranger: Stranger = request.getfixturevalue(kind)
    stranger.add_runs()
    for words in WORDS[name]:
        done = stranger.types(*(word.format(run=RUN, other="runs/other") for word in words))
        assert "Traceback" not in done.stderr, (words, done.stderr)
        # A command with such an option ends before it could start anything.
        assert "no such option" not in done.stderr, (words, done.stderr)
        stranger.require_untouched()


def test_a_dry_run_does_not_ask_the_program_that_starts_containers(container: Stranger) -> None:
    done = container.types(*DRY)
    assert done.returncode == 0, done.stderr
    assert "not accepted yet" in done.stderr
    assert f"{container.folder}/apptainer-of-ours" in done.stdout
    container.require_untouched()


@pytest.mark.parametrize("words", [(), ("--array", "0-1")])
def test_after_acceptance_a_submission_names_a_program_that_does_not_read_the_image(
    container: Stranger, words: tuple[str, ...]
) -> None:
    done = container.types(*SUBMIT, *words)
    assert done.returncode == NotAccepted.exit_status, done.stderr
    container.require_untouched()
    digest = re.search("--accept ([0-9a-f]{32})", done.stderr)
    assert digest
    done = container.types(*SUBMIT, *words, "--accept", digest[1])
    assert done.returncode == 0, done.stderr
    assert "SingularityCE, which starts containers here, does not read that" in done.stderr
    assert container.mark.exists()


def test_the_api_plans_without_a_start(container: Stranger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in container.environ.items():
        monkeypatch.setenv(name, value)
    plan = api.plan_job("train.py", project=container.folder, nproc=1, gpus=0, frozen=True, allow_dirty=True)
    assert plan.manifest.environment.apptainer == f"{container.folder}/apptainer-of-ours"
    container.require_untouched()


def test_the_hook_sees_what_is_started(container: Stranger, tmp_path: Path) -> None:
    code = "import os, subprocess; subprocess.run(['./evil']); os.execv('./evil', ['evil'])"
    subprocess.run([sys.executable, "-c", code], cwd=container.folder, env=container.environ, check=True)
    assert container.started() == [["./evil"], ["./evil"]]
    assert container.mark.exists()
