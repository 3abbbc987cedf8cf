"""The sessions in README and docs are real: their commands run in the testbed and print what is shown."""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from .conftest import IMAGE, ROOT, STORE, TESTBED, Cluster, Project, copy_examples

pytestmark = pytest.mark.cluster


def sessions(page: str) -> list[tuple[str, str]]:
    """Each `$ command` of a page's console blocks with the output below it."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output))
    return found


# What differs from run to run, or with each new field and check: a reader sees a real value.
_DIFFERS = re.compile(r"\b[0-9a-f]{12}\b|\b[0-9]+(?= (?:fields compared|fine|not run)\b)")


def check_output(page: str, command: str, expected: str, printed: str, errors: str) -> None:
    """Compare what a command printed with what the page shows; `...`, a short digest or a count stands for any."""
    assert "frame #" not in printed, f"$ {command}\n--- printed\n{printed}"
    want = re.sub(_DIFFERS, "...", expected).replace("\n\n", "\n<BLANKLINE>\n")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(want, printed, flags), (
        f"$ {command}\n--- {page}\n{want}\n--- printed\n{printed}{errors}"
    )


def prints_what_is_shown(page: str, cluster: Cluster, folder: str, *, store: str, user: str = "alice") -> None:
    """Run a page's sessions in `folder`, one command after the other, and compare."""
    status = 0
    for command, expected in sessions(page):
        # stdout alone: what hpcenv says about its progress goes to stderr.
        shell = f"export HPCENV_STORE={store}; (exit {status}); {command}"
        done = cluster.run("bash", "-c", shell, cwd=folder, user=user, timeout=600)
        status = done.status
        check_output(page, command, expected, done.stdout, done.stderr)


# A run that is rejected: its SIF changes while it waits.
REJECTED = """
hpcenv init --image {image} --plain-http registry:5000 && hpcenv lock
sbatch --quiet --job-name busy --nodes 2 --exclusive --output /dev/null --wrap 'sleep 600'
hpcenv submit examples/train.py --nodes 2 --gpus 0 --nproc 2 --name second
sif=$(hpcenv image inspect --path)
chmod u+w $sif && printf x | dd of=$sif bs=1 seek=9000000 conv=notrunc status=none
scancel --name busy
hpcenv wait second
"""


@pytest.fixture
def project(cluster: Cluster) -> Iterator[Project]:
    """A folder with a rejected run. What the fixture starts and damages is gone afterwards."""
    made = Project(cluster, f"/home/alice/hpcenv-tests/readme-{uuid.uuid4().hex[:6]}")
    copy_examples(cluster, made.folder)
    shell = f"export HPCENV_STORE={made.folder}/store\n{REJECTED.format(image=IMAGE)}"
    done = cluster.run("bash", "-c", shell, cwd=made.folder, timeout=600)
    assert done.status == 90, done.stdout + done.stderr
    yield made
    cluster.run("scancel", "--name", "busy", "--user", "alice")
    cluster.run("rm", "-rf", f"{made.folder}/store")


def test_the_readme_shows_what_a_rejected_run_prints(cluster: Cluster, project: Project) -> None:
    assert len(sessions("README.md")) == 2
    prints_what_is_shown("README.md", cluster, project.folder, store=f"{project.folder}/store")


@pytest.fixture
def review(cluster: Cluster) -> Iterator[str]:
    """A reviewer's folder, bob's: a clone of alice's repository, and beside it what she published of a run."""
    name = uuid.uuid4().hex[:6]
    authors = Project(cluster, f"/home/alice/hpcenv-tests/paper-{name}")
    copy_examples(cluster, authors.folder)
    git = "git -c init.defaultBranch=main -c user.name=alice -c user.email=alice@example.org"
    authors.must("init", "--image", IMAGE, "--plain-http", "registry:5000")
    store = f"export HPCENV_STORE={STORE}"
    commit = f"hpcenv lock && {git} init -q && {git} add -A && {git} commit -qm paper"
    shape = "--nodes 2 --gpus 0 --nproc 2 --name table-1 --wait"
    cluster.must("bash", "-c", f"{store}; {commit}", cwd=authors.folder)
    cluster.must("bash", "-c", f"{store}; hpcenv submit examples/train.py {shape} -- --steps 60", cwd=authors.folder)
    published = "lock.toml manifest.json submission.json verdict.json finished.json facts exits job.sbatch job.log"
    pack = f"{git} bundle create -q paper.bundle main && tar -C runs -cf run.tar $(printf 'table-1/%s ' {published})"
    cluster.must("bash", "-c", f"{pack} && chmod a+r paper.bundle run.tar", cwd=authors.folder)
    folder = f"/home/bob/hpcenv-tests/review-{name}"
    copied = f"mkdir -p {folder}/supplement && tar -C {folder}/supplement -xf - && chmod -R u+w {folder}"
    tar = subprocess.run(
        [str(TESTBED), "exec", "--", "cat", f"{authors.folder}/run.tar"], capture_output=True, check=True
    )
    cluster.must("bash", "-c", copied, user="bob", stdin=os.fsdecode(tar.stdout))
    bundle = subprocess.run(
        [str(TESTBED), "exec", "--", "cat", f"{authors.folder}/paper.bundle"], capture_output=True, check=True
    )
    cloned = f"cat > paper.bundle && {git} clone -q -b main paper.bundle paper"
    cluster.must("bash", "-c", cloned, user="bob", cwd=folder, stdin=os.fsdecode(bundle.stdout))
    yield f"{folder}/paper"
    cluster.run("rm", "-rf", folder, user="bob")


def test_a_reviewers_session_prints_what_is_shown(cluster: Cluster, review: str) -> None:
    page = "docs/how-to/reproduce.md"
    assert len(sessions(page)) >= 5
    prints_what_is_shown(page, cluster, review, store=f"{review}/../store", user="bob")


TUTORIAL = "docs/tutorial.md"


def tutorial() -> list[tuple[str, str, str]]:
    """The user, the command and the expected output of every prompt of the tutorial."""
    text = (ROOT / TUTORIAL).read_text(encoding="utf-8")
    steps = []
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for user, step in re.findall(r"^(alice|bob)\$ (.*?)(?=^(?:alice|bob)\$ |\Z)", block, re.MULTILINE | re.DOTALL):
            command, _, output = step.partition("\n")
            steps.append((user, command, output))
    return steps


@pytest.fixture
def newcomers(cluster: Cluster) -> Iterator[dict[str, str]]:
    """New home folders for alice and bob, with the examples where the tutorial puts them."""
    name = uuid.uuid4().hex[:6]
    homes = {user: f"/home/{user}/hpcenv-tests/tutorial-{name}" for user in ("alice", "bob")}
    copy_examples(cluster, f"{homes['alice']}/paper")
    cluster.must("mkdir", "-p", homes["bob"], user="bob")
    yield homes
    cluster.run("scancel", "--name", "busy", "--user", "alice")
    for user, home in homes.items():
        cluster.run("rm", "-rf", home, "/tmp/paper.bundle", "/tmp/table-1.tar", user=user)


def test_the_tutorial_prints_what_it_shows(cluster: Cluster, newcomers: dict[str, str]) -> None:
    """Each user has one shell: its folder, its variables and the last exit status stay from one command to the next."""
    steps = tutorial()
    assert {user for user, _, _ in steps} == {"alice", "bob"}
    assert len(steps) >= 20
    for user, command, expected in steps:
        state = f"{newcomers[user]}/.shell"
        keep = f'status=$?; {{ echo "cd $(printf %q "$PWD")"; declare -p sif 2>/dev/null; echo "(exit $status)"; }} > {state}'
        shell = f"export HOME={newcomers[user]}; cd; [ ! -f {state} ] || . {state}\n{command}\n{keep}"
        done = cluster.run("bash", "-c", shell, user=user, timeout=600)
        check_output(TUTORIAL, f"({user}) {command}", expected, done.stdout, done.stderr)


def test_the_shell_that_the_tutorial_opens_finds_hpcenv(cluster: Cluster) -> None:
    """Debian's /etc/profile sets a PATH without hpcenv, and `exec` without a command is a login shell."""
    done = subprocess.run([str(TESTBED), "exec"], input="hpcenv --version\nid -un\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"hpcenv, version \S+\nalice\n", done.stdout), done.stdout + done.stderr
