"""The SIF that a node runs is the locked one: known again without reading it, and refused whatever was done to it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import Cluster, Done, Project, before_step

pytestmark = pytest.mark.cluster

SHAPE = ("--gpus", "0", "--nproc", "1", "--wait")

# What somebody may do who wants it not to show. $1 is the SIF, beside it $1.kept is the right one.
DAMAGE = {
    "another file of the same size and time": 'cp -p "$1" "$1.new"; chmod u+w "$1.new"; %s "$1.new"; touch -r "$1.kept" "$1.new"; mv -f "$1.new" "$1"',
    "one byte in place": 'chmod u+w "$1"; %s "$1"; touch -r "$1.kept" "$1"',
    "cut short": 'chmod u+w "$1"; truncate -s -4096 "$1"; touch -r "$1.kept" "$1"',
}
FLIP = 'flip() { printf x | dd of="$1" bs=1 seek=9000000 conv=notrunc status=none; }; flip'


def damage(how: str, sif: str) -> str:
    program = DAMAGE[how].replace("%s", FLIP, 1).replace("%s", "flip")
    return f"sh -c '{program}' sh '{sif}'"


@pytest.fixture
def guarded(sif_project: Project, cluster: Cluster) -> Iterator[str]:
    """The project's SIF, put back afterwards; `.kept` is it."""
    sif = sif_project.sif()
    # A hard link would be damaged with it.
    cluster.must("sh", "-c", f'mv "{sif}" "{sif}.kept" && cp -p "{sif}.kept" "{sif}"')
    yield sif
    cluster.must("sh", "-c", f'rm -f "{sif}.new"; mv -f "{sif}.kept" "{sif}"')


@pytest.fixture
def submit(sif_project: Project, cluster: Cluster) -> Callable[..., Done]:
    """Submit a run in which something is done right before a step."""

    def run(name: str, *words: str, before: str = "", does: str = "") -> Done:
        cluster.write(f"{sif_project.folder}/says.py", "print('TRAINED', flush=True)\n")
        site = before_step(sif_project, before, does) if before else ()
        return sif_project.hpcenv("submit", "says.py", *SHAPE, "--name", name, *site, *words, timeout=300)

    return run


def checked(project: Project, run: str) -> dict[str, str]:
    facts = [json.loads(text) for text in project.cluster.must(
        "sh", "-c", f"for f in {project.folder}/runs/{run}/facts/*.json; do tr -d '\\n' < $f; echo; done"
    ).splitlines()]  # fmt: skip
    for one in facts:
        took = one["seconds"]["sif"] - one["seconds"].get("probe", 0)
        print(f"{run}: {one['node']}: {one['sif']['checked']} in {took:.3f} s; {one['sif']['why']}")
    return {one["node"]: one["sif"]["checked"] for one in facts}


def test_a_shared_sif_is_known_again_without_reading_it(
    sif_project: Project, cluster: Cluster, submit: Callable[..., Done]
) -> None:
    cluster.must("sleep", "6")  # the file system's clock must have ticked since the SIF was made
    done = submit("known", "--nodes", "2")
    assert done.status == 0, done.text
    assert checked(sif_project, "known") == {"n1": "identity", "n2": "identity"}
    report = sif_project.must("report", "known")
    assert "n[1-2]  match" in report and "SIF: same file as hashed" in report
    [facts] = [sif_project.record("known", "facts/n1.json")]
    assert facts["seconds"]["sif"] - facts["seconds"]["probe"] < 0.3
    records = cluster.must("sh", "-c", "ls ~/.cache/hpcenv/sif").split()
    before = cluster.must("sh", "-c", "stat -c '%n %y' ~/.cache/hpcenv/sif/*")
    assert submit("again", "--nodes", "2", "--dry-run").status == 0
    # The hash at submission was taken once: its record is used, not written anew.
    assert records
    assert cluster.must("sh", "-c", "stat -c '%n %y' ~/.cache/hpcenv/sif/*") == before


def test_a_sif_that_was_changed_before_the_submission_is_refused_there(
    cluster: Cluster, guarded: str, submit: Callable[..., Done]
) -> None:
    cluster.must("sh", "-c", damage("one byte in place", guarded))
    done = submit("late", "--nodes", "1")
    assert done.status == 11, done.text
    assert "is not the locked SIF" in done.stderr
    assert "hint: `hpcenv image build` moves it aside, and makes the locked one again" in done.stderr


# The others: HPCENV_TEST_LONG=1.
@pytest.mark.parametrize(
    "how", ["one byte in place", *(pytest.param(how, marks=pytest.mark.long) for how in [*DAMAGE][::2])]
)
def test_a_sif_that_was_changed_after_the_submission_is_refused_on_the_node(
    sif_project: Project, guarded: str, submit: Callable[..., Done], how: str
) -> None:
    name = "after-" + how.split()[0]
    done = submit(name, "--nodes", "1", before="check", does=damage(how, guarded))
    assert done.status == 90, done.text
    assert "TRAINED" not in done.stdout
    assert set(checked(sif_project, name).values()) == {"full"}
    findings = sif_project.record(name, "verdict.json")["findings"]
    assert [f["field"] for f in findings if f["severity"] == "must"] == ["container.sif.sha256"]


@pytest.mark.parametrize("how", [[*DAMAGE][0], pytest.param([*DAMAGE][1], marks=pytest.mark.long)])
def test_a_sif_that_was_changed_between_check_and_launch_is_refused(
    sif_project: Project, guarded: str, submit: Callable[..., Done], how: str
) -> None:
    name = "between-" + how.split()[0]
    done = submit(name, "--nodes", "1", before="task", does=damage(how, guarded))
    assert done.status == 90, done.text
    assert "TRAINED" not in done.stdout
    assert "error[node-rejected]: the SIF changed on node n" in done.stdout
    assert Path(guarded).name in done.stdout
    assert "is not the file that was checked" in done.stdout
    assert sif_project.record(name, "verdict.json")["result"] == "mismatch"


# n1 has passed its gate when its torchrun listens for the other nodes.
WAIT = """
import json, socket, sys, time
with open(sys.argv[1]) as file:
    place = json.load(file)["rendezvous"]
until = time.monotonic() + 120
while True:
    try:
        socket.create_connection((place["host"], place["port"]), timeout=5).close()
        break
    except OSError:
        if time.monotonic() > until:
            raise
        time.sleep(0.2)
"""


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_one_node_that_refuses_at_the_start_ends_the_job_with_90_after_one_attempt(
    sif_project: Project, cluster: Cluster, guarded: str, submit: Callable[..., Done], rounds: int
) -> None:
    """n1 has begun, and waits for n2. srun ends it because n2 has refused: that is no request to stop."""
    cluster.write(f"{sif_project.folder}/wait.py", WAIT)
    statuses = []
    for number in range(rounds):
        name = f"alone-{rounds}-{number}"
        wait = f"python3 {sif_project.folder}/wait.py {sif_project.folder}/runs/{name}/env/n2.json"
        does = f'if [ "$SLURMD_NODENAME" = n2 ]; then {wait}; {damage("one byte in place", guarded)}; fi'
        done = submit(name, "--nodes", "2", "--requeue", "always", before="task", does=does)
        statuses.append(done.status)
        assert done.status == 90, done.text
        assert "TRAINED" not in done.stdout
        assert "error[node-rejected]: the SIF changed on node n2 after it was checked" in done.stdout
        finished = sif_project.record(name, "finished.json")
        assert (finished["status"], finished["again"], finished["before_training"]) == (90, False, False)
        assert sif_project.record(name, "exits/n1.json")["asked_to_end"] == "SIGTERM"
        assert [one["result"] for one in sif_project.record(name, "verdict.json")["nodes"]] == ["match", "mismatch"]
        assert cluster.run("test", "-e", f"{sif_project.folder}/runs/{name}/attempts").status == 1
        cluster.must("cp", "-pf", f"{guarded}.kept", guarded)
    print(f"{statuses.count(90)} of {rounds}: 90 after one attempt")


@pytest.mark.long
def test_a_second_attempt_proves_the_sif_again(sif_project: Project, guarded: str, submit: Callable[..., Done]) -> None:
    """The first attempt matched; while the job is queued again the SIF becomes another."""
    again = (
        f'if [ -z "${{SLURM_RESTART_COUNT:-}}" ]; then {damage("one byte in place", guarded)}; '
        "scontrol requeue $SLURM_JOB_ID; sleep 60; fi"
    )
    # Slurm starts it again when its credential has expired: after 20 s in the testbed.
    done = submit("twice", "--nodes", "1", before="task", does=again)
    assert done.status == 90, done.text
    assert "TRAINED" not in done.stdout
    assert sif_project.record("twice", "verdict.json")["attempt"] == 1
    assert sif_project.record("twice", "attempts/0/verdict.json")["result"] == "match"
